import sys, time
from concurrent.futures import ThreadPoolExecutor
t0=time.time()
import torch
from ninfer.formats import KvFormat
from ninfer.ops.cuda import attend_few as af
from ninfer.ops.cuda.attend_few import Shape as S, attend
plan={
 'int8':([('g2b1',33,S(64)),('g2b1s2',33,S(64,2)),('k32g2b1',33,S(32)),('g1b2',66,S(64,0,1,2)),('k32g2b2',66,S(32,2,2,2))],
    [(85000,1),(85000,4),(8192,1),(8192,4),(1000,1),(128,1),(128,4)]),
 'bf16':([('k32g2b1',33,S(32)),('k64g1b1',33,S(64,0,1,1))],[(85000,1),(85000,4),(1000,1)]),
 'fp8':([('g2b1',33,S(64)),('g2b1s2',33,S(64,2))],[(85000,1),(85000,4),(1000,1)]),
 'nvfp4':([('g2b1',33,S(64)),('k32g2b2',66,S(32,0,2,2))],[(85000,1),(85000,4),(1000,1)]),
 'k8v4':([('g2b1',33,S(64))],[(85000,1),(85000,4)]),
}
if sys.argv[1:]==['compile']:
    jobs=[(KvFormat(f),256,4,6,target,tiles,shape) for f,(vs,cases) in plan.items() for _,target,shape in vs for tiles in (1,3)]
    torch.cuda.current_stream()
    def one(j):
        from ninfer.ops.cuda.compile import compile_source
        m,_=af._kernels(*j)
        compile_source(m.source,m.defines,'sm_90a')
    with ThreadPoolExecutor(6) as pool: list(pool.map(one,jobs))
    print('compiled',len(jobs),time.time()-t0,flush=True); sys.exit()
from bench.ops.attention import measure, random_pages
torch.manual_seed(0)
dev=torch.device('cuda')
R=4470.0
print('import',time.time()-t0,flush=True)
def att(target, shape):
    return lambda q,pages,t,pos,scale,gate: attend(q,pages,t,pos,scale,gate,None,target,shape)
for f,(variants,cases) in plan.items():
    pages=random_pages(KvFormat(f),1329*3,dev)
    for name,target,shape in variants:
        line=f'{f:6} {name:8} '
        for depth,T in cases:
            try:
                r=measure(pages,depth,T,1,att(target,shape))
                line+=f' {depth//1000 if depth>999 else depth}/T{T}: {r.us:6.2f}us {r.gb_s/R:5.1%} |'
            except Exception as e:
                line+=f' {depth}/T{T}: {str(e)[-70:]!r} |'
        print(line, f'{time.time()-t0:.1f}', flush=True)
    del pages
