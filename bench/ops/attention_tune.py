import sys, functools, traceback
import torch
from bench.ops import ceiling
from bench.ops.attention import measure, random_pages, bytes_of
from ninfer.formats import KvFormat
from ninfer.ops.cuda.attend_few import Shape, attend
torch.manual_seed(0)
dev=torch.device('cuda')
best=ceiling.measure(dev)
print(best, flush=True)
R=best.read
def att(target, shape, portable=False):
    def f(q,pages,t,pos,scale,gate):
        return attend(q,pages,t,pos,scale,gate,None,target,shape,portable)
    return f
S=Shape
plan={
 'int8':([('g2b1',33,S(64)),('g2b1s2',33,S(64,2)),('k32g2b1',33,S(32)),('g1b2',66,S(64,0,1,2)),('g1b2t33',33,S(64,0,1,2)),('k32g2b2',66,S(32,2,2,2)),('g1b1',33,S(64,4,1,1))],
    [(85000,1),(85000,4),(8192,1),(8192,4),(1000,1),(128,1),(128,4)]),
 'bf16':([('k32g2b1',33,S(32)),('k64g2b1',33,S(64,0,1,1)),('k32g1b2',66,S(32,0,1,2))],[(85000,1),(85000,4),(1000,1),(128,4)]),
 'fp8':([('g2b1',33,S(64)),('g2b1s2',33,S(64,2)),('k32g2',33,S(32))],[(85000,1),(85000,4),(1000,1),(128,4)]),
 'nvfp4':([('g2b1',33,S(64)),('g1b2',66,S(64,0,1,2)),('k32g2b2',66,S(32,0,2,2))],[(85000,1),(85000,4),(1000,1),(128,4)]),
 'k8v4':([('g2b1',33,S(64)),('k32g2b2',66,S(32,2,2,2))],[(85000,1),(85000,4),(1000,1),(128,4)]),
}
only=sys.argv[1].split(',') if len(sys.argv)>1 else plan
for f in only:
    fmt=KvFormat(f)
    pages=random_pages(fmt,1329*4,dev)
    variants,cases=plan[f]
    for name,target,shape in variants:
        line=f'{f:6} {name:8} '
        for depth,T in cases:
            try:
                r=measure(pages,depth,T,1,att(target,shape))
                line+=f' {depth//1000 if depth>999 else depth}/T{T}: {r.us:6.2f}us {r.gb_s/R:5.1%} |'
            except Exception as e:
                line+=f' {depth}/T{T}: {str(e)[-70:]!r} |'
        print(line, flush=True)
    del pages
