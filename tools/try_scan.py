import sys, torch
sys.path.insert(0, ".")
from tests.ops.cuda.test_gdn import *
from bench.ops import gdn as B
d = torch.device("cuda")
if sys.argv[1] == "tiny":
    check_delta(delta_problem(TINY, 1, 64, d))
else:
    p = delta_problem(FULL, 1, 128, d)
    q, k, v, g, beta, states, s, t = p
    B.stages("x", q, k, v, g, beta, states, torch.zeros(1, dtype=torch.int32, device=d), torch.empty_like(v))
print("ok")
