import torch, sys
sys.path.insert(0,'.')
from tests.kernels.test_cpu import *
from tests.graphs import graph_of
from stretto.kernels import native
print(native.isas(), native.threads_runtime())
bad=0
graph = graph_of("hub"); print(graph.num_rows, graph.num_edges, graph.edge_csr.tasks.shape, graph.edge_csr.hubs.shape, graph.edge_csr.num_slots)
options = [v.options for v in VARIANTS["spmm"]["cpu"] if v.backend == "native"]
import itertools,time
t0=time.time(); n=0
while time.time()-t0<float(sys.argv[1]):
    for th in (1,2,5,16):
        torch.set_num_threads(th)
        for width in (1, 40, 128, 200, 256, 602):
            x, weight = values(40, width, dtype=torch.float32), values(graph.num_edges, dtype=torch.float32)
            for given in (None, weight):
                results = [cpu.spmm(graph.edge_csr, x, given, reduce="sum", **c)[0] for c in options]
                n+=1
                for o,r in zip(options,results):
                    if not torch.equal(r, results[0]):
                        bad+=1
                        d=(r!=results[0]).nonzero()
                        print("BAD",th,width,given is not None,o,d.shape,d[:4].tolist(), (r-results[0]).abs().max().item(), r.isnan().sum().item(), results[0].isnan().sum().item())
print(n,bad)
