"""Lookahead decoding for ``model.generate(custom_generate=..., trust_remote_code=True)``."""

from lookahead_decoding import generate as lookahead_generate


def generate(model, inputs=None, **kwargs):
    """``model.generate(inputs, **kwargs)``, decoded with lookahead.

    ``lookahead``, ``references``, ``on_unsupported`` and ``statistics`` are taken beside the arguments of ``generate``.
    """
    return lookahead_generate(model, inputs, **kwargs)
