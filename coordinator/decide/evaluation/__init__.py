"""One evaluation as a pure state machine: `step(state, site, event) -> Step(intents, actions)`.

Rule: no module here reads a clock, file, process or queue. Events are facts in the past tense, actions are imperatives; the
journal of events is the only truth. Start with `step.py`.
"""
