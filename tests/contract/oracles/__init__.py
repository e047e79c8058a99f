"""Oracles: one slow, obvious implementation per mixer, from its equations, in float64.

An oracle sees one document from its first token on and knows nothing of calls, rows, ranks or fused kernels:

    run(mixer, model, weights, hidden) -> Answer

takes the mixer's and the model's configuration, the mixer's parameters by name and hidden [tokens, hidden_size].
Oracles share no code with megamem.memory or megamem.ops.

Shapes: vectors of one token and head are [width], which is head_dim unless values are wider.
"""
