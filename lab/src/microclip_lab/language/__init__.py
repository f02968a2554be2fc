"""The language recipe: T5 on sentences from four domains, or on the eight tasks of SuperGLUE."""
