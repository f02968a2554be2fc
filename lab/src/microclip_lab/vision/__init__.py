"""The vision recipe: ViT and DeiT on digits, on CIFAR-10 as people labelled it, or on a folder.

Nothing heavy is imported before data or a model are asked for.
"""
