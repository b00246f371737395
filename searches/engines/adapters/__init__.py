"""One file per inference engine, which :mod:`searches.engines.peer` and, in the engine's own environment, its worker load.

A file is named after the package of its engine, and imports nothing but the standard library at its top. It has

- ``LOADS``: ``folder`` or ``gguf``, the form in which the engine loads a model;
- ``ROUNDS_TO``, if it is not the data type that is asked for: that to which the engine rounds at most;
- ``conversion(python, saved, dtype)``, if folders must be converted: the words of the command, without the new folder;
- ``command(settings)``: the command that decodes so without this program;
- ``Engine(settings)`` with ``version``, ``precision`` and ``decode(request, on_round)``, which returns the new tokens.

``settings`` are ``model``, ``dtype``, ``threads``, ``max_length`` (in tokens), ``python`` (the interpreter), ``environment``
(variables that it needs) and ``speculative_config``, which is in vLLM's words and empty for plain decoding. A request has
``tokens``, ``max_new_tokens``, ``eos`` and ``repetition_penalty``. ``on_round`` takes the number of new tokens after every
round.
"""
