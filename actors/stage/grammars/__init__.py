"""Constrained output: grammars, and the masks of what they allow next.

Two libraries make them. llguidance has schemas, patterns and choices (guidance.py): it keeps nearly
all of JSON Schema, and how often something may repeat does not lengthen its masks. But it cuts a
text into longest words, and so loses texts of an EBNF grammar whose words overlap; xgrammar
(ebnf.py) loses none. Both get the tokens' bytes from vocabulary.py, as the detokenizer does.
"""
