"""What architectures are, as data: hyper-parameters and tensor lists, one module per GGUF architecture.

Nothing here computes and nothing imports torch, so that files are checked, described and planned for in milliseconds.
The module of the same name one level up holds the tensor functions.
"""
