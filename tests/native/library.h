// The functions of a library of native kernels, as kernels/cpu/library.cpp exports them.

#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "layer_ops.h"
#include "sampling.h"

namespace proof {

using namespace specinfer;

struct Library {
  int32_t (*ready)();
  int32_t (*int4_is_exact)();
  void (*set_threads)(int32_t);
  void (*multiply)(const Product*, int32_t, const void*, int64_t, void*);
  void (*add_norm)(int32_t, void*, const void*, const Norm*, void*, const int64_t*, int64_t, int64_t, int32_t);
  void (*gate)(int32_t, int32_t, const void*, void*, int64_t, int64_t);
  void (*activate)(int32_t, int32_t, const void*, void*, int64_t, int64_t);
  int32_t (*embed)(int32_t, const void*, int64_t, const int64_t*, float, void*, int64_t, int64_t);
  int32_t (*fault_of_paths)(const Paths*, int64_t);
  void (*rope_and_store)(int32_t, const Heads*, const Paths*, const void*, const float*, const float*,
                         const LayerCache*, void*);
  void (*tree_attention)(int32_t, const Heads*, const Paths*, const void*, const LayerCache*, void*);
  int64_t (*most_likely)(const float*, int64_t, int64_t, int64_t*);
  double (*mass)(const float*, int64_t, double, double);
  int64_t (*racers)(const float*, int64_t, const int64_t*, int64_t, double, uint64_t, int64_t*);
  int32_t (*likeliest)(int32_t, const void*, int64_t, int64_t, int64_t, const int64_t*, int64_t, int64_t, const double*,
                       int64_t*, float*, int64_t*, double*);
  int64_t (*choices)(int32_t, const void*, int64_t, int64_t, int64_t, const int64_t*, int64_t, const RowSampling*,
                     const int64_t*, const Terms*, const int64_t*, int64_t*);

  explicit Library(const char* path) {
    void* const library = dlopen(path, RTLD_NOW);
    if (library == nullptr) {
      std::printf("%s\n", dlerror());
      std::exit(1);
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function != nullptr) return;
      std::printf("%s has no %s\n", path, name);
      std::exit(1);
    };
    find(ready, "specinfer_ready");
    find(int4_is_exact, "specinfer_int4_is_exact");
    find(set_threads, "specinfer_set_threads");
    find(multiply, "specinfer_multiply");
    find(add_norm, "specinfer_add_norm");
    find(gate, "specinfer_gate");
    find(activate, "specinfer_activate");
    find(embed, "specinfer_embed");
    find(fault_of_paths, "specinfer_fault_of_paths");
    find(rope_and_store, "specinfer_rope_and_store");
    find(tree_attention, "specinfer_tree_attention");
    find(most_likely, "specinfer_most_likely");
    find(mass, "specinfer_mass");
    find(racers, "specinfer_racers");
    find(likeliest, "specinfer_likeliest");
    find(choices, "specinfer_choices");
  }
};

}  // namespace proof
