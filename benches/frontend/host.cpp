// Host time of a call through NVIDIA's frontend in C++, for the problem of `device host`: causal (1,32,8,8,8,128) in bf16.
//
// c++ -std=c++17 -O2 -DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING -I FRONTEND/include -I CUDNN/include -I CUDA/include host.cpp -ldl -o host
// CUDNN_GRAPH_LIBRARY=FOLDER LD_LIBRARY_PATH=FOLDER_OF_CUDART ./host
//
// The headers and libraries are those of the wheels nvidia-cudnn-frontend, nvidia-cudnn-jit-cu13, nvidia-cuda-runtime, -crt, -cccl, -nvrtc.
#include <cudnn_frontend.h>

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <unordered_map>

namespace fe = cudnn_frontend;
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

constexpr int BATCH = 100;
constexpr int ROUNDS = 200;

static void hold(bool holds, const char* what) {
    if (!holds) {
        std::printf("FAILED: %s\n", what);
        std::exit(1);
    }
}

static void good(fe::error_t status) {
    hold(status.is_good(), status.get_message().c_str());
}

int main() {
    const char* folder = std::getenv("CUDNN_GRAPH_LIBRARY");
    hold(folder != nullptr, "CUDNN_GRAPH_LIBRARY names no folder");
    fe::cudnn_dlhandle = dlopen((std::string(folder) + "/libcudnn.so.9").c_str(), RTLD_NOW | RTLD_GLOBAL);
    hold(fe::cudnn_dlhandle != nullptr, "libcudnn.so.9 does not load");
    void* runtime = dlopen("libcudart.so.13", RTLD_NOW | RTLD_GLOBAL);
    runtime = runtime ? runtime : dlopen("libcudart.so.12", RTLD_NOW | RTLD_GLOBAL);
    hold(runtime != nullptr, "libcudart.so does not load");
    const auto take = reinterpret_cast<cudaError_t (*)(void**, size_t)>(dlsym(runtime, "cudaMalloc"));
    const auto wait = reinterpret_cast<cudaError_t (*)()>(dlsym(runtime, "cudaDeviceSynchronize"));
    const auto room = [&](size_t bytes) {
        void* memory = nullptr;
        hold(take(&memory, std::max<size_t>(bytes, 256)) == cudaSuccess, "cudaMalloc");
        return memory;
    };

    const auto create = reinterpret_cast<cudnnStatus_t (*)(cudnnHandle_t*)>(dlsym(fe::cudnn_dlhandle, "cudnnCreate"));
    const auto version = reinterpret_cast<size_t (*)()>(dlsym(fe::cudnn_dlhandle, "cudnnGetVersion"));
    cudnnHandle_t handle = nullptr;
    hold(create(&handle) == CUDNN_STATUS_SUCCESS, "cudnnCreate");

    constexpr int64_t heads_q = 32, heads_kv = 8, seq = 8, dim = 128;
    fe::graph::Graph graph;
    graph.set_io_data_type(fe::DataType_t::BFLOAT16).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    const auto tensor = [&](const char* name, int64_t heads) {
        return graph.tensor(
            fe::graph::Tensor_attributes().set_name(name).set_dim({1, heads, seq, dim}).set_stride({heads * seq * dim, seq * dim, dim, 1}));
    };
    const auto q = tensor("q", heads_q), k = tensor("k", heads_kv), v = tensor("v", heads_kv);
    const auto options =
        fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(false).set_causal_mask(true).set_attn_scale(0.088388347f);
    const auto results = graph.sdpa(q, k, v, options);
    const auto o = results[0];
    o->set_output(true).set_dim({1, heads_q, seq, dim}).set_stride({heads_q * seq * dim, seq * dim, dim, 1});
    good(graph.build(handle, {fe::HeurMode_t::A}));
    int64_t scratch = 0;
    good(graph.get_workspace_size(scratch));
    std::unordered_map<std::shared_ptr<fe::graph::Tensor_attributes>, void*> pack = {
        {q, room(heads_q * seq * dim * 2)}, {k, room(heads_kv * seq * dim * 2)}, {v, room(heads_kv * seq * dim * 2)}, {o, room(heads_q * seq * dim * 2)}};
    void* workspace = room(size_t(scratch));

    double best = std::numeric_limits<double>::infinity();
    for (int round = 0; round < ROUNDS; round++) {
        const auto start = std::chrono::steady_clock::now();
        for (int n = 0; n < BATCH; n++) {
            good(graph.execute(handle, pack, workspace));
        }
        best = std::min(best, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() / BATCH);
        hold(wait() == cudaSuccess, "cudaDeviceSynchronize");
    }
    std::printf("cuDNN %zu, frontend %d, C++ execute: %.3f microseconds per call, least of %d batches of %d\n", version(), CUDNN_FRONTEND_VERSION, best, ROUNDS, BATCH);
    return 0;
}
