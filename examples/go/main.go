// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command client connects network namespaces by gRPC, without CNI, as an
// orchestrator would. docs/use-without-cni.md explains the calls;
// examples/python is the same program in Python.
//
//	client connect NETNS CONTAINER [LABEL=VALUE…]
//	client label CONTAINER [LABEL=VALUE…]
//	client policies FILE…
//	client -none policies
//	client watch
//	client reclaim CONTAINER…
//	client -none reclaim
//	client disconnect CONTAINER
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func main() {
	runDir := flag.String("run-dir", "/run/sluice", "directory of the sockets")
	namespace := flag.String("namespace", "", "namespace for policies; empty: default")
	none := flag.Bool("none", false, "confirm that the list of policies or containers is empty")
	timeout := flag.Duration("timeout", 30*time.Second, "how long a command may take; watch has no end")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if flag.Arg(0) != "watch" {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *timeout)
		defer cancel()
	}
	if err := run(ctx, *runDir, *namespace, *none, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "client:", err)
		os.Exit(1)
	}
}

// run executes one command.
func run(ctx context.Context, runDir, namespace string, none bool, args []string) error {
	node, err := Dial(runDir)
	if err != nil {
		return err
	}
	defer node.Close()
	command, args := args[:min(1, len(args))], args[min(1, len(args)):]
	switch name := strings.Join(command, ""); {
	case name == "connect" && len(args) >= 2:
		labels, err := parseLabels(namespace, args[2:])
		if err != nil {
			return err
		}
		endpoint, err := node.Connect(ctx, owner(args[1]), args[0], labels)
		if err != nil {
			return err
		}
		show("connected", endpoint)
	case name == "label" && len(args) >= 1:
		labels, err := parseLabels(namespace, args[1:])
		if err != nil {
			return err
		}
		endpoint, err := node.Relabel(ctx, owner(args[0]), labels)
		if err != nil {
			return err
		}
		show("labelled", endpoint)
	case (name == "policies" || name == "reclaim") && (len(args) > 0) == none:
		return errors.New("name files or containers, or say -none")
	case name == "policies":
		return policies(ctx, node, args)
	case name == "watch" && len(args) == 0:
		err := node.Watch(ctx, func(e *datapathv1.Endpoint) { show("endpoint", e) },
			func(owner string) { fmt.Println("removed", owner) })
		if errors.Is(err, context.Canceled) {
			return nil // the user ended it
		}
		return err
	case name == "reclaim":
		owners := make([]*workloadv1.Owner, 0, len(args))
		for _, container := range args {
			owners = append(owners, owner(container))
		}
		removed, err := node.Reclaim(ctx, owners)
		if err != nil {
			return err
		}
		fmt.Println("reclaimed", len(removed))
	case name == "disconnect" && len(args) == 1:
		return node.Disconnect(ctx, owner(args[0]))
	default:
		return errors.New("want connect, label, policies, watch, reclaim or disconnect; see the head of main.go")
	}
	return nil
}

// policies replaces the policies of this program with the policies in the files.
func policies(ctx context.Context, node *Node, files []string) error {
	var manifests []byte
	for _, file := range files {
		content, err := os.ReadFile(file) //nolint:gosec // files that the user names
		if err != nil {
			return err
		}
		manifests = append(append(manifests, "\n---\n"...), content...)
	}
	revision, err := node.SetPolicies(ctx, manifests)
	if err != nil {
		return err
	}
	fmt.Println("enforced revision", revision)
	return nil
}

// owner is the key of a workload's only interface.
func owner(container string) *workloadv1.Owner {
	return &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"}
}

// parseLabels makes labels of KEY=VALUE. With a namespace the workload counts as
// a pod of it, and its labels have the source k8s; without one as a pod of default.
func parseLabels(namespace string, pairs []string) ([]*workloadv1.Label, error) {
	source := "cni"
	var labels []*workloadv1.Label
	if namespace != "" {
		source = "k8s"
		for _, key := range []string{
			"io.kubernetes.pod.namespace",
			"io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name",
		} {
			labels = append(labels, &workloadv1.Label{Source: source, Key: key, Value: namespace})
		}
	}
	for _, pair := range pairs {
		key, value, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("label %q is not KEY=VALUE", pair)
		}
		labels = append(labels, &workloadv1.Label{Source: source, Key: key, Value: value})
	}
	return labels, nil
}

// show prints what happened, the owner, the identity and the addresses.
func show(what string, e *datapathv1.Endpoint) {
	words := []string{what, ownerText(e.GetOwner()), fmt.Sprint(e.GetIdentity())}
	fmt.Println(strings.Join(slices.Concat(words, e.GetAddresses()), " "))
}

func ownerText(o *workloadv1.Owner) string { return o.GetContainerId() + "/" + o.GetInterfaceName() }
