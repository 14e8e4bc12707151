"""One page that shows a run: HTML without scripts, complete without a network.

`read` takes what a run left in its folder, as much as there is; `page` makes the text of the file.
The same folder gives the same bytes: no clock, no path of this machine, no random number.
"""
