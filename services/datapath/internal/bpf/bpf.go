// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bpf holds the compiled programs of the repository's bpf/ folder and the Go types of the data
// that they share with user space. Everything but this file is generated; only package kernel uses it.
package bpf

// The objects depend only on the sources: headers are vendored, the target is fixed, paths are relative
// and debug sections other than BTF are stripped. The shared maps and types are generated once, and the
// programs without them; package kernel passes the maps to the programs when it loads them.
//
//go:generate -command compile go tool bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -go-package bpf -cflags "-O2 -mcpu=v3 -std=gnu11 -fno-strict-aliasing -nostdinc -isystem ../../../../bpf/third_party/libbpf -isystem ../../../../bpf/third_party/linux -I ../../../../bpf/include -Wall -Wextra -Werror"
//go:generate compile -cflags "-O2 -mcpu=v3 -std=gnu11 -fno-strict-aliasing -nostdinc -isystem ../../../../bpf/third_party/libbpf -isystem ../../../../bpf/third_party/linux -I ../../../../bpf/include -Wall -Wextra -Werror -Wpadded" -output-stem maps -type sl_reason -type sl_direction -type sl_kind -type sl_scope -type sl_action -type sl_by -type sl_event_type -type sl_ct_stat -type sl_side -type sl_event -type sl_question -type sl_answer -type sl_packet -type sl_program -type sl_sock -type sl_socket Maps ../../../../bpf/maps.c
//go:generate compile -no-global-types -output-stem from_pod FromPod ../../../../bpf/from_pod.c
//go:generate compile -no-global-types -output-stem to_pod ToPod ../../../../bpf/to_pod.c
//go:generate compile -no-global-types -output-stem from_overlay FromOverlay ../../../../bpf/from_overlay.c
//go:generate compile -no-global-types -output-stem to_overlay ToOverlay ../../../../bpf/to_overlay.c
//go:generate compile -no-global-types -output-stem from_uplink FromUplink ../../../../bpf/from_uplink.c
//go:generate compile -no-global-types -output-stem from_underlay FromUnderlay ../../../../bpf/from_underlay.c
//go:generate compile -no-global-types -output-stem to_uplink ToUplink ../../../../bpf/to_uplink.c
//go:generate compile -no-global-types -output-stem from_tap FromTap ../../../../bpf/from_tap.c
//go:generate compile -no-global-types -output-stem into_proxy IntoProxy ../../../../bpf/into_proxy.c
//go:generate compile -no-global-types -output-stem judge Judge ../../../../bpf/judge.c
//go:generate compile -no-global-types -output-stem socket_lb SocketLB ../../../../bpf/socket_lb.c
//go:generate compile -no-global-types -output-stem list_sockets ListSockets ../../../../bpf/list_sockets.c
