"""Fakes and fixtures that several folders of tests share; benches and chaos campaigns use `toys`, too."""
