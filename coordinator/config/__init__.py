"""The settings: their schema, where they come from, the strict TOML reader, and the text that `evalspan init` writes.

Rule: one frozen `Config`; an unknown key or a wrong value is refused with its line. Start with
`schema.py`.
"""
