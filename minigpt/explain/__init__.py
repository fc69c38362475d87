"""What happens inside a model while it reads and writes: numbers for `minigpt explain`, computed by the model itself.

Each file computes one explanation and prints nothing; the commands in ``cli/explain`` show them.
"""
