// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/rpc/client"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Ports of web. The policy of web allows the client to connect to both, the policy of the client only to the first.
const (
	openPort   = 8080
	closedPort = 9090
)

// patience limits waits for events that normally take microseconds.
const patience = 10 * time.Second

// comparePolicies shows the manifests and the changes that they would make.
func (d *demo) comparePolicies(ctx context.Context) error {
	files, err := filepath.Glob(filepath.Join(d.policies, "*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no policies in %s: %w", d.policies, errors.Join(err))
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		fmt.Printf("   $ cat %s\n", file)
		for line := range strings.Lines(string(content)) {
			fmt.Printf("   %s", line)
		}
		fmt.Println()
	}
	const differs = 1 // as of diff(1)
	return d.showExit(ctx, differs, "sluice", "--instance", instance, "policy", "diff", "-f", d.policies)
}

// applyPolicies applies the policies and tries which pods can connect.
func (d *demo) applyPolicies(ctx context.Context) error {
	if err := d.show(ctx, "sluice", "--instance", instance, "policy", "apply", "-f", d.policies); err != nil {
		return err
	}
	web, caller, visitor := d.pods[0], d.pods[1], d.pods[2]
	stop, err := echo(web, openPort, closedPort)
	if err != nil {
		return err
	}
	defer stop()
	for _, address := range web.Addresses() {
		if err := d.allowed(ctx, caller, netip.AddrPortFrom(address, openPort)); err != nil {
			return err
		}
		if err := d.denied(ctx, caller, netip.AddrPortFrom(address, closedPort)); err != nil {
			return err
		}
		if err := d.denied(ctx, visitor, netip.AddrPortFrom(address, openPort)); err != nil {
			return err
		}
	}
	return nil
}

// explainDrop shows the drop event, and the reasons that the policy service and the kernel's tables give.
func (d *demo) explainDrop(ctx context.Context) error {
	web, visitor := d.pods[0], d.pods[2]
	sluice := func(args ...string) error {
		return d.show(ctx, "sluice", append([]string{"--instance", instance}, args...)...)
	}
	from, to := d.ids[2], d.ids[0]
	return errors.Join(
		sluice("observe", "--since", "1m", "--reason", "policy-denied", "--address", visitor.IPv4.String()),
		sluice("policy", "explain", "--from", from, "--to", to, "--port", fmt.Sprint(openPort)),
		sluice("explain", "--from", visitor.IPv4.String(), "--to", web.IPv4.String(), "--port", fmt.Sprint(openPort)),
	)
}

// echo returns received bytes on ports of a pod until stop is called.
func echo(p pod.Pod, ports ...uint16) (stop func(), err error) {
	var wg sync.WaitGroup
	var listeners []net.Listener
	stop = func() {
		for _, l := range listeners {
			_ = l.Close()
		}
		wg.Wait()
	}
	for _, port := range ports {
		l, err := p.Listen(netip.AddrPortFrom(netip.IPv6Unspecified(), port))
		if err != nil {
			stop()
			return nil, err
		}
		listeners = append(listeners, l)
		wg.Go(func() {
			for {
				c, err := l.AcceptTCP()
				if err != nil {
					return // stop has closed the listener
				}
				wg.Go(func() {
					_, _ = io.Copy(c, c)
					_ = c.Close()
				})
			}
		})
	}
	return stop, nil
}

// talk sends a word over a new connection and requires the same word as the answer.
func talk(ctx context.Context, from pod.Pod, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := from.Dial(ctx, to)
	if err != nil {
		return err
	}
	defer c.Close()
	if deadline, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(deadline)
	}
	const word = "sluice"
	if _, err := io.WriteString(c, word); err != nil {
		return err
	}
	back := make([]byte, len(word))
	_, err = io.ReadFull(c, back)
	return err
}

func (d *demo) allowed(ctx context.Context, from pod.Pod, to netip.AddrPort) error {
	begin := time.Now()
	if err := talk(ctx, from, to); err != nil {
		return fmt.Errorf("%s to %s: %w, want it allowed", from.Name, to, err)
	}
	fmt.Printf("   %-7s → %-21s connected, answered after %d µs\n", from.Name, to, time.Since(begin).Microseconds())
	return nil
}

// denied tries to connect until the datapath reports the dropped packet. The client itself receives no answer to wait
// for.
func (d *demo) denied(ctx context.Context, from pod.Pod, to netip.AddrPort) error {
	conn, err := client.Dial(d.node.Socket(devnode.Datapath), client.Options{})
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	events, err := datapathv1.NewObserverServiceClient(conn).Observe(ctx, &datapathv1.ObserveRequest{
		Follow: true, Since: timestamppb.Now(), Reasons: []datapathv1.Reason{datapathv1.Reason_REASON_POLICY_DENIED},
		Prefixes: []string{to.Addr().String() + "/" + fmt.Sprint(to.Addr().BitLen())}, Ports: []uint32{uint32(to.Port())},
	})
	if err != nil {
		return err
	}
	begin := time.Now()
	talked := make(chan error, 1)
	go func() { talked <- talk(ctx, from, to) }()
	event, err := events.Recv()
	took := time.Since(begin)
	cancel()
	if terr := <-talked; terr == nil {
		return fmt.Errorf("%s talked to %s, want it denied", from.Name, to)
	}
	if err != nil {
		return fmt.Errorf("%s to %s: no drop is reported: %w", from.Name, to, err)
	}
	flow := event.GetFlow()
	side, rule := "web's", strings.Join(flow.GetIngress().GetRuleSources(), ", ")
	if flow.GetEgress().GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED {
		side, rule = from.Name+"'s", strings.Join(flow.GetEgress().GetRuleSources(), ", ")
	}
	if rule == "" {
		rule = "no rule allows it"
	}
	fmt.Printf("   %-7s → %-21s dropped, reported after %d µs: %s side, %s\n", from.Name, to, took.Microseconds(), side,
		rule)
	return nil
}
