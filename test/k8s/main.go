// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command sluice-k8s runs Kubernetes for tests, from programs that
// scripts/k8s-binaries has built.
//
//	sluice-k8s api DIR    run etcd and kube-apiserver alone, until standard input ends
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"

	"github.com/sluice-net/sluice/test/k8s/apitest"
	"golang.org/x/sys/unix"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	if len(args) != 2 || args[0] != "api" {
		fmt.Fprintln(os.Stderr, "sluice-k8s: wants api, with an empty directory")
		return 2
	}
	if err := apitest.Serve(ctx, args[1], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "sluice-k8s:", err)
		return 1
	}
	return 0
}
