"""Does the answer transfer? One table over encoders, kinds of data and kinds of unknown input.

A recipe trains or loads an encoder and makes a feature file; everything after it sees features alone, no images.
"""
