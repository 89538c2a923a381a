"""`draftkit report RUN...`: one self-contained page of finished, unfinished or compared runs, from their files alone.

`runs` reads a run directory; `rl`, `acceptance`, `training` and `drafts` say what is in it, in the nouns of `document`;
`charts` draws; `page` writes HTML, `markdown` the same with PNGs; `build` is the command. No engine, no torch.
"""
