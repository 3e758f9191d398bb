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
plan={
 'int8':([('64x3',66,Shape(64,3)),('32x5',66,Shape(32,5)),('32x6',66,Shape(32,6)),('32x4',66,Shape(32,4)),('64x2',66,Shape(64,2)),('64x2b3',99,Shape(64,2,3)),('32x4b3',99,Shape(32,4,3)),('64x5b1',33,Shape(64,5,1)),('64x4b1',33,Shape(64,4,1))],
    [(85000,1),(85000,4),(8192,1),(8192,4),(1000,1),(128,1),(128,4)]),
 'fp8':([('64x3',66,Shape(64,3)),('32x5',66,Shape(32,5)),('32x4',66,Shape(32,4)),('64x2',66,Shape(64,2))],[(85000,1),(85000,4),(1000,1)]),
 'bf16':([('32x3',66,Shape(32,3)),('32x2',66,Shape(32,2)),('64x3b1',33,Shape(64,3,1)),('32x5b1',33,Shape(32,5,1))],[(85000,1),(85000,4),(1000,1)]),
 'nvfp4':([('64x4',66,Shape(64,4)),('64x3',66,Shape(64,3)),('32x4b3',99,Shape(32,4,3)),('64x3b4',132,Shape(64,2,4))],[(85000,1),(85000,4),(1000,1)]),
 'k8v4':([('64x3',66,Shape(64,3)),('64x4',66,Shape(64,4)),('32x4b3',99,Shape(32,4,3))],[(85000,1),(85000,4)]),
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
    if f in('int8','bf16'):
        for depth in (128,85000):
            r=measure(pages,depth,1,1,att(66,None,True)); print(f, 'triton', depth, f'{r.us:.2f} us {r.gb_s/R:.1%}', flush=True)
    del pages
