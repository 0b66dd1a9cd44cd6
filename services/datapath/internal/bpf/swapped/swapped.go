// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package swapped holds the programs compiled with the two layouts of connections exchanged: the
// previous layout of package bpf is the current one here, and vice versa. Tests of package kernel
// upgrade from one to the other and go back. Everything but this file is generated.
package swapped

//go:generate -command compile go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -go-package swapped -no-global-types -cflags "-DSL_SWAP_LAYOUTS -O2 -mcpu=v3 -std=gnu11 -fno-strict-aliasing -nostdinc -isystem ../../../../../bpf/third_party/libbpf -isystem ../../../../../bpf/third_party/linux -I ../../../../../bpf/include -Wall -Wextra -Werror"
//go:generate compile -output-stem maps Maps ../../../../../bpf/maps.c
//go:generate compile -output-stem from_pod FromPod ../../../../../bpf/from_pod.c
//go:generate compile -output-stem to_pod ToPod ../../../../../bpf/to_pod.c
