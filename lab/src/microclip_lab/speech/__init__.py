"""The speech recipe: a Conformer with CTC, and canaries that measure memorization.

Data: words spoken by espeak-ng, or any folder in LibriSpeech's layout.
"""
