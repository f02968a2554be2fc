"""Speech: a Conformer that writes down what it hears, with canaries to measure what it memorises.

Words spoken by espeak-ng, or any folder in LibriSpeech's layout.
"""
