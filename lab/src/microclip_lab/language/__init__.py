"""The language recipe: T5 on sentences of four domains, or on the eight tasks of SuperGLUE."""
