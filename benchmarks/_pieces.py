import sys, time, torch, cProfile, pstats, io
from pararnn import *
from pararnn.kernels.support import launcher
L=launcher()
dev="cuda"
def med(f,n=400):
    for _ in range(30): f()
    torch.cuda.synchronize(); ts=[]
    for _ in range(n):
        t=time.perf_counter(); f(); ts.append(time.perf_counter()-t)
    torch.cuda.synchronize()
    ts.sort(); return 1e6*ts[n//2]
def wall(f,n=300):
    for _ in range(30): f()
    torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return 1e6*(time.perf_counter()-t)/n
for Cell in (ParaGRU, ParaLSTM):
    m=ParaRNN(Cell(64,64)).to(dev); x=torch.randn(8,128,64,device=dev)
    ps=list(m.parameters())
    def fwd():
        with torch.no_grad(): m(x)
    def both():
        y,_=m(x); torch.autograd.grad(y,ps,y)
    def fwdg(): m(x)
    print(Cell.__name__,"fwd wall",wall(fwd),"host",med(fwd),"| fwd recorded host",med(fwdg),"| both wall",wall(both),"host",med(both))
    keep=[]
    rf=L.run_forward; ra=L.run_adjoint
    L.run_forward=lambda p,pl:(keep.append((p,pl)),rf(p,pl))[1]
    back=[]
    L.run_adjoint=lambda *a,**k:(back.append((a,k)),ra(*a,**k))[1]
    both(); L.run_forward=rf; L.run_adjoint=ra
    p,pl=keep[0]; a,k=back[0]
    print("  plan",pl)
    print("  run_forward host",med(lambda: rf(p,pl)),"run_adjoint host",med(lambda: ra(*a,**k)))
    lin=m.cells[0].in_proj
    def l():
        with torch.no_grad(): lin(x)
    print("  linear host",med(l))
    c=m.cells[0]
    print("  recurrent_params",med(lambda: c.recurrent_params()), "drives", med(lambda: c.drives(x)))
    pr=cProfile.Profile(); pr.enable()
    for _ in range(300): fwd()
    pr.disable(); s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats("tottime").print_stats(28); print(s.getvalue()[:5200])
    if Cell is ParaGRU:
        pr=cProfile.Profile(); pr.enable()
        for _ in range(300): ra(*a,**k)
        pr.disable(); s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats("tottime").print_stats(22); print(s.getvalue()[:4200])
m=ParaRNN(ParaGRU(64,64),num_layers=4).to(dev); h=m.init_state(8); xt=torch.randn(8,64,device=dev)
def st():
    with torch.no_grad(): m.step(xt,h)
print("decode 4 layers wall",wall(st),"host",med(st))
