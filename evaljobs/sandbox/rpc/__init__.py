"""Carries values between a test and the program that it tests, each in a process of its own: `checker` runs the test, `link`
and `handle` ask the program, `candidate` answers. `codec`, `arguments` and `frames` are what crosses; `names` reads a test's
text.

Rule: what comes from the program's process is data that is parsed and bounded, never an object. Start reading at `checker`.
"""
