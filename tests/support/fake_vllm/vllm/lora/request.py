"""Adapters, which the fake has none of."""


class LoRARequest:
    pass
