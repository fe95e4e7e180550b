"""Carries values between a test and the program under test, each in its own process.

`checker` runs the test, `link` and `handle` call the program, `candidate` answers. `codec`,
`arguments` and `frames` are what crosses; `names` analyses a test's text.

Rule: what comes from the program's process is data, parsed and bounded, never an object. Start
reading at `checker`.
"""
