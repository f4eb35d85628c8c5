"""`cam demo`: a small MoE model trained over four processes, compared with the same model in one.

Read moe first: it is what using cam.ep looks like. rank_part is what each process does, whole_part the same
in one process, compare puts their results side by side.
"""
