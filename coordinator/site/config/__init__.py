"""The settings: schema, sources, the strict TOML reader, and the file that `evalspan init` writes.

Rule: one frozen `Config`; an unknown key or a wrong value is refused with its line. Start with `schema.py`.
"""
