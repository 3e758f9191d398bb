import sys, torch
sys.path.insert(0, ".")
from tests.ops.cuda.test_gdn import *
d = torch.device("cuda")
if sys.argv[1] == "wide":
    for g in (FULL, TINY):
        check_delta(delta_problem(g, 1, 64, d))
        print("ok", g)
else:
    for g in (FULL, (3, 3, 64, 64)):
        c = make(g, 2, 3, d, hidden=5120)
        check_mix(c)
        check_records(c)
        print("ok", g)
