// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// filesBeside is the number of unchanged policy files next to the changing one.
const filesBeside = 99

// byFile measures the time from the rename of a file to the enforcement of its policy, alternating with the same
// change by a call. Packets prove that the policy is enforced when the service reports it.
func (b *bench) byFile(ctx context.Context) (err error) {
	var written []string
	defer func() {
		// Keep one policy without subject pods: an empty directory would keep all policies for a while.
		for _, path := range written[:max(0, len(written)-1)] {
			err = errors.Join(err, os.Remove(path))
		}
		err = errors.Join(err, b.policies.remove(context.WithoutCancel(ctx), "bench-called"))
		if err == nil {
			err = b.policies.waitForCount(ctx, 1)
		}
	}()
	for i := range filesBeside + 1 {
		name := fmt.Sprintf("bench-file-%d", i)
		text := renamedPolicy(name, 7200)
		if i > 0 {
			text = strings.ReplaceAll(text, "part: changes", "part: beside")
		}
		path, err := b.files().put(name, text)
		if err != nil {
			return err
		}
		written = append(written, path)
	}
	// The source trusts the modification time of a file only if the file did not change recently.
	for begin := time.Now(); time.Since(begin) < 5*time.Second; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond): // poll interval
		}
	}
	probe, err := b.labelled("sluice", "role", "probe")
	if err != nil {
		return err
	}
	from, err := probe.connect(ctx, b.prefix+"-file-probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, probe.disconnect(context.WithoutCancel(ctx), from)) }()
	server, err := b.labelled("sluice", "part", "changes")
	if err != nil {
		return err
	}
	to, err := server.connect(ctx, b.prefix+"-file-server")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.disconnect(context.WithoutCancel(ctx), to)) }()

	// The calls use ports 7000 and 7001, the files 7100 and 7101.
	var called, filed, above samples
	for turn := range b.sizes.changes + 1 {
		byCall, took, err := b.callThenFile(ctx, turn)
		if err != nil {
			return err
		}
		if turn == 0 {
			continue
		}
		called, filed, above = append(called, byCall), append(filed, took), append(above, took-byCall)
		for _, more := range []int{0, 100} {
			if err := onlyOnePortOpen(from, to, more+portOf(turn-1), more+portOf(turn)); err != nil {
				return fmt.Errorf("change %d: %w", turn, err)
			}
		}
	}
	fmt.Fprintf(b.out,
		"From the call of UpsertPolicies, and from the rename of a file among %d others, until the kernel "+
			"enforces the change for one endpoint. %d changes each, alternating; after each, packets prove the old port "+
			"closed and the new one open. The revision after a file's change is polled every 0.2 ms, so its "+
			"time includes up to one extra pause and one extra call.\n\n",
		filesBeside, b.sizes.changes)
	fmt.Fprintln(b.out, "| change | enforced p50 | p99 | worst |")
	fmt.Fprintln(b.out, "|---|---|---|---|")
	for _, row := range []struct {
		what string
		of   samples
	}{{"by call", called}, {"by file", filed}, {"by file, minus the call before it", above}} {
		fmt.Fprintf(b.out, "| %s | %s | %s | %s |\n", row.what, milliseconds(row.of.quantile(0.5)),
			milliseconds(row.of.quantile(0.99)), milliseconds(row.of.worst()))
	}
	b.wantTime(fmt.Sprintf("change enforced, p50 minus the call before it: a file among %d others", filesBeside),
		2*time.Millisecond, above.quantile(0.5))
	return nil
}

// callThenFile makes one change by a call and then the same change by a file, and returns the time until the
// enforcement of each.
func (b *bench) callThenFile(ctx context.Context, turn int) (byCall, byFile time.Duration, err error) {
	c, err := b.policies.upsert(ctx, renamedPolicy("bench-called", portOf(turn)))
	if err != nil {
		return 0, 0, err
	}
	byFile, err = b.files().change(ctx, "bench-file-0", renamedPolicy("bench-file-0", 100+portOf(turn)))
	return c.enforced, byFile, err
}

// policyFiles are the manifests in a node's directory of policies.
type policyFiles struct {
	node     *devnode.Node
	policies policies
	pause    time.Duration // before a change: the source pauses after each scan for a multiple of the scan's duration
}

func (b *bench) files() policyFiles { return policyFiles{b.node, b.policies, 100 * time.Millisecond} }

// put replaces the file of a name by one rename, and returns its path.
func (f policyFiles) put(name, manifest string) (path string, err error) {
	next, err := f.prepare(manifest)
	if err != nil {
		return "", err
	}
	path = filepath.Join(f.node.PolicyDir(), name+".yaml")
	return path, os.Rename(next, path)
}

// prepare writes a manifest to a file that the source does not read.
func (f policyFiles) prepare(manifest string) (path string, err error) {
	path = filepath.Join(f.node.PolicyDir(), ".next")
	return path, errors.Join(os.WriteFile(path, []byte(manifest), 0o644), os.Chmod(path, 0o644))
}

// change replaces the file of a name, and returns the time from the rename to the enforcement.
func (f policyFiles) change(ctx context.Context, name, manifest string) (time.Duration, error) {
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(f.pause):
	}
	next, err := f.prepare(manifest)
	if err != nil {
		return 0, err
	}
	before, err := f.policies.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	if err := os.Rename(next, filepath.Join(f.node.PolicyDir(), name+".yaml")); err != nil {
		return 0, err
	}
	err = f.policies.waitForNext(ctx, before.GetRevision())
	return time.Since(begin), err
}

func renamedPolicy(name string, port int) string {
	return strings.ReplaceAll(serverPolicy(port, ""), "bench-changes", name)
}

// waitForNext waits for a revision after the given one, and for its enforcement.
func (p policies) waitForNext(ctx context.Context, revision uint64) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		_, err := p.client.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: revision + 1})
		if status.Code(err) == codes.OutOfRange && ctx.Err() == nil {
			time.Sleep(200 * time.Microsecond) // poll interval: the file has not been read yet
			continue
		}
		if err != nil {
			return fmt.Errorf("wait for the revision after %d: %w", revision, err)
		}
		return nil
	}
}

// waitForCount waits until n policies are enforced.
func (p policies) waitForCount(ctx context.Context, n uint32) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		st, err := p.client.GetStatus(ctx, &policyv1.GetStatusRequest{})
		if err != nil {
			return fmt.Errorf("wait until %d policies are enforced: %w", n, err)
		}
		if st.GetPolicies() == n {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %d policies are enforced, now %d: %w", n, st.GetPolicies(), ctx.Err())
		case <-time.After(10 * time.Millisecond): // poll interval
		}
	}
}
