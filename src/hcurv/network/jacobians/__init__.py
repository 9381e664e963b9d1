"""How pre-activations move the weighted outputs: one kind of Jacobian for each way to store it.

`output_jacobian` says what every kind can be asked for, and `jacobian_plan` what it must say about
its memory before anything is allocated.
"""
