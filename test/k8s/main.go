// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command sluice-k8s runs a Kubernetes cluster on one machine, in namespaces,
// from programs that scripts/k8s-binaries has built.
//
//	sluice-k8s up [options] NAME       start a cluster and leave it running
//	sluice-k8s down NAME               remove it
//	sluice-k8s kubectl NAME ARG...     ask its API
//	sluice-k8s in-node NAME N ARG...   run a command on a node; the first is 0
//	sluice-k8s api DIR                 run etcd and kube-apiserver alone, until standard input ends
//
// The programs are in the directory SLUICE_BIN, by default the parent of the directory of
// this program: the tree's bin.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"

	"github.com/sluice-net/sluice/test/k8s/apitest"
	"github.com/sluice-net/sluice/test/k8s/cluster"
	"github.com/sluice-net/sluice/test/k8s/internal/keeper"
	"github.com/sluice-net/sluice/test/k8s/internal/machine"
	"golang.org/x/sys/unix"
)

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	if len(args) < 2 {
		fmt.Fprintln(os.Stderr,
			"sluice-k8s: wants up, down, kubectl or in-node with the name of a cluster, or api with a directory")
		return 2
	}
	verb, rest := args[0], args[1:]
	var err error
	switch verb {
	case "up":
		err = up(ctx, rest)
	case "down":
		err = keeper.Remove(cluster.Dir(rest[0]))
	case "kubectl":
		err = inCluster(rest[0], func(c *cluster.Cluster) (*exec.Cmd, error) { return c.KubectlCommand(ctx, rest[1:]...) })
	case "in-node":
		err = inNode(ctx, rest)
	case "api":
		err = apitest.Serve(ctx, rest[0], os.Stdin, os.Stdout)
	case cluster.KeepCommand:
		err = keep(ctx, rest, log)
	case machine.MachineCommand:
		err = machine.Run(rest[0], log)
	case machine.NodeCommand:
		err = machine.RunNode(rest, log)
	case machine.NodeInitCommand:
		err = machine.RunNodeInit(rest, log)
	default:
		err = fmt.Errorf("%s: no such command", verb)
	}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "sluice-k8s:", err)
		return 1
	}
	return 0
}

func up(ctx context.Context, args []string) error {
	o := cluster.Options{Detached: true}
	f := flag.NewFlagSet("up", flag.ContinueOnError)
	f.IntVar(&o.Nodes, "nodes", 1, "how many nodes")
	f.StringVar(&o.Containerd, "containerd", "", "path of the containerd binary; empty: Debian's")
	f.BoolVar(&o.NoCNI, "no-cni", false, "leave the nodes without a network, for one that is deployed later")
	f.Func("image", "an OCI archive that every node imports; may be given several times", func(file string) error {
		o.Images = append(o.Images, file)
		return nil
	})
	f.Func("mount", "a directory that every node has under its path; may be given several times", func(dir string) error {
		o.Mounts = append(o.Mounts, dir)
		return nil
	})
	if err := f.Parse(args); err != nil {
		return err
	}
	if f.NArg() != 1 {
		return errors.New("up: wants the name of a cluster")
	}
	o.Dir = cluster.Dir(f.Arg(0))
	c, err := cluster.Start(ctx, o)
	if err != nil {
		return err
	}
	fmt.Printf("cluster %s runs below %s\n", f.Arg(0), c.Dir())
	fmt.Printf("ask it:  %s kubectl %s get pods -A\n", os.Args[0], f.Arg(0))
	return nil
}

func keep(ctx context.Context, args []string, log *slog.Logger) error {
	if len(args) == 2 && args[1] == cluster.UntilInputEnds {
		return keeper.Keep(ctx, args[0], os.Stdin, log)
	}
	return keeper.Keep(ctx, args[0], nil, log)
}

func inNode(ctx context.Context, args []string) error {
	if len(args) < 3 {
		return errors.New("in-node: wants a cluster, a node's index from 0, and a command")
	}
	var index int
	if _, err := fmt.Sscan(args[1], &index); err != nil {
		return err
	}
	return inCluster(args[0], func(c *cluster.Cluster) (*exec.Cmd, error) {
		return c.NodeCommand(ctx, index, args[2:]...)
	})
}

func inCluster(name string, command func(*cluster.Cluster) (*exec.Cmd, error)) error {
	c, err := cluster.Open(cluster.Dir(name))
	if err != nil {
		return err
	}
	run, err := command(c)
	if err != nil {
		return err
	}
	run.Stdin, run.Stdout, run.Stderr = os.Stdin, os.Stdout, os.Stderr
	return run.Run()
}
