"""Replays of request traces through the block manager: waste, sharing, hit rate and the manager's own time.

traces.py    requests from files, or made up
driver.py    the loop: arrival, admission, decode, preemption
memory.py    what the loop drives: the block manager, and contiguous allocators to compare it with
beams.py     which beams survive;  timeline.py  what the memory was used for
run.py       a replay from options to figures;  report.py  its figures;  plot.py  its picture
command.py   the command line

No file but the command's needs torch, so that other managers can be driven by the same loop elsewhere.
"""
