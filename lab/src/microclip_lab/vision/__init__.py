"""The vision recipe: ViT and DeiT on digits, CIFAR-10 with human labels, or a folder of images.

Imports nothing heavy until data or a model is needed.
"""
