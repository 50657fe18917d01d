"""Files in makers' own formats, as the device's software saves them: one file -> header + uint8 frames.

In: an open file of Heidelberg (.vol, .e2e), Topcon (.fda, .fds) or Zeiss (.img). Out: as every reader, the
header and then the frames, or a named reason. `kinds.py` first: it chooses. What a file states is taken;
what only a library's author guessed (a spacing of E2E, the direction of Topcon's B-scans) stays unknown and
is asked for.
"""
