"""Decoders of the kind that Llama made common, and their families.

Letters in comments: B sequences, T tokens, W width, N heads, K heads of keys and values, D width of a head.
"""
