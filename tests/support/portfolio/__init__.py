"""Drawn rows for the suite `portfolio`, placed where lm-eval looks for its data sets offline."""
