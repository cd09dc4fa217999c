"""Stock preprocessing against the online path: how long until the first step, what is decoded and written for it."""
