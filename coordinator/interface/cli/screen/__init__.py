"""Views of running and ended evaluations: the tables of `status`, the screen of `watch`, `eval` and the daemon."""
