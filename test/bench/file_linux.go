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
		path, err := b.putNext(name, text)
		if err == nil {
			err = b.replaceByNext(path)
		}
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
	byFile, err = b.changeFile(ctx, "bench-file-0", renamedPolicy("bench-file-0", 100+portOf(turn)))
	return c.enforced, byFile, err
}

// putNext writes a manifest next to a policy's file, and returns its path.
func (b *bench) putNext(name, manifest string) (string, error) {
	next := filepath.Join(b.node.PolicyDir(), ".next")
	return filepath.Join(b.node.PolicyDir(), name+".yaml"), errors.Join(
		os.WriteFile(next, []byte(manifest), 0o644), os.Chmod(next, 0o644))
}

// replaceByNext renames the manifest of putNext to the policy's file.
func (b *bench) replaceByNext(path string) error {
	return os.Rename(filepath.Join(b.node.PolicyDir(), ".next"), path)
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
