// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package devnode runs a whole Sluice node on one machine: a network namespace
// of its own joined to the caller's by a veth, an embedded etcd and every
// service under one run directory. `sluice dev` is a thin command line around
// it, and the node tests, the demo and the benchmarks of module test use it
// as a library.
//
// Contract (agreed with module test):
//
//	node, err := devnode.Up(ctx, devnode.Options{Instance, RunDir, StateDir, BPFDir, BinDir, PodCIDRs, …})
//	node, err := devnode.Open(instance or run dir)   // the node that another process brought up
//	node.Netns()                     path of the node's network namespace
//	node.Socket(service)             path of a service's socket
//	node.CNIConfDir(), node.CNIConflist()  ready configuration for the shim, and its content
//	node.PID(service)                of the running process
//	node.Kill(ctx, service)          SIGKILL, and wait until it is gone
//	node.Start(ctx, service, opts…)  start it again exactly as Up did; WithExtraFiles(…*os.File)
//	                                 passes descriptors (from fd 3 on), WithArgs(…) adds arguments,
//	                                 WithoutWaiting() does not wait for SERVING
//	node.Stop(ctx, service)          SIGTERM, and wait
//	node.Down(ctx)                   end everything and leave nothing
//	node.Logs(service)               path of its log file
//
// Services are named as their sockets: "etcd", "identity", "ipam", "datapath".
package devnode
