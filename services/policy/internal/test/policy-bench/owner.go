// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/looptime"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/source"
	tables "github.com/sluice-net/sluice/services/policy/internal/stream"
	"github.com/sluice-net/sluice/services/policy/internal/test/synthetic"
)

// owned is an owner in this process, with a subscriber that acknowledges everything immediately.
type owned struct {
	*owner.Owner
	ctx      context.Context
	cluster  *synthetic.Cluster
	subjects []identity.Numeric
	manifest string
}

// bytesInCall is the approximate size of one call of UpsertPolicies.
const bytesInCall = 1 << 20

// measureOwner performs all operations of an owner, and reports how long each of them occupied the owner's goroutine.
func measureOwner(s synthetic.Shape) (out []line, err error) {
	dir, err := os.MkdirTemp("", "policy-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	cluster, err := synthetic.Make(s)
	if err != nil {
		return nil, err
	}
	n, err := owner.New(owner.Config{
		Engine: engine.Config{Cluster: synthetic.Name, AllowHost: true},
		Rules:  rule.Options{Cluster: synthetic.Name, LocalClusterOnly: true},
		Linger: time.Minute, MaxPolicies: 40_000, MaxManifestBytes: 256 << 20, MaxNames: 4096, MaxAddresses: 65_536,
		Stream: tables.Defaults(), Log: slog.New(slog.DiscardHandler), Processor: processorTime,
	}, dir, []string{source.Identity, managed.SourceFile})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for processorTime; the thread ends with the goroutine
		ended <- n.Run(ctx)
	}()
	defer func() {
		stop()
		err = errors.Join(err, <-ended, n.Close())
	}()
	o := &owned{Owner: n, ctx: ctx, cluster: cluster}
	o.subjects = slices.Clone(cluster.Subjects)
	slices.Sort(o.subjects)
	o.subjects = slices.Compact(o.subjects)

	longest := make(map[string]time.Duration) // longest turn of each operation before the step
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"10,000 identities, no subject", o.identities},
		{"all policies, no subject, 1 MB in a call", o.apply},
		{"500 subjects", o.subscribe},
		{"a policy that selects all subjects, changed 20 times", o.ofAll},
		{"all identities except the subjects are removed and added again", o.burst},
		{"all policies deleted in one call", o.deleteAll},
		{"all policies applied, 1 MB in a call", o.apply},
		{"1,000 policies deleted one by one", o.deleteSome},
		{"400 groups of 500 prefixes, 20 in a call", o.groups},
		{"status, list, validate", o.read},
		{"all subjects are removed and added again", o.comeBack},
		{"the rest of the policies deleted in one call", o.deleteAll},
		{"all policies as 200 files, all at once", o.files},
		{"one of the 200 files changes", o.fileChanges},
		{"all policies as one file instead of 200 files", o.oneFile},
		{"all files are removed", func() error { return o.Feed(managed.SourceFile).Set(o.ctx, nil) }},
	} {
		began := time.Now()
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", step.what, err)
		}
		took := time.Since(began)
		st, err := o.Reader().Status(ctx)
		if err != nil {
			return nil, err
		}
		worst := loop.Figures{Figures: looptime.Figures{Operation: "nothing longer than before"}}
		for _, b := range st.Busy {
			if b.Longest > longest[b.Operation] {
				longest[b.Operation] = b.Longest
				if b.Longest > worst.Longest {
					worst = b
				}
			}
		}
		out = append(out, line{step.what, fmt.Sprintf("%s; longest %s (%s)", short(took), short(worst.Longest), worst.Operation)})
	}
	st, err := o.Reader().Status(ctx)
	if err != nil {
		return nil, err
	}
	for _, b := range st.Busy {
		out = append(out,
			line{"the owner, " + b.Operation, histogram(b.Figures)},
			line{"its processor time", histogram(b.Processor)})
	}
	return out, nil
}

// wanted limits the duration of one operation of the owner.
const wanted = 100 * time.Millisecond

// histogram returns the number of operations by duration, in coarser steps than the figures.
func histogram(f looptime.Figures) string {
	var b strings.Builder
	count, over := uint64(0), f.Count
	for i, bound := range looptime.Bounds {
		count += f.Buckets[i]
		if bound <= wanted {
			over -= f.Buckets[i]
		}
		switch bound {
		case time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, wanted, 250 * time.Millisecond:
			fmt.Fprintf(&b, "≤ %s: %d, ", bound, count)
			count = 0
		}
	}
	fmt.Fprintf(&b, "all: %d; longer than %s: %d; longest %s", f.Count, wanted, over, short(f.Longest))
	return b.String()
}

func (o *owned) identities() error {
	for list := range slices.Chunk(o.cluster.Identities, 512) {
		if err := o.Identities().SetIdentities(o.ctx, list, nil); err != nil {
			return err
		}
	}
	return nil
}

func (o *owned) apply() error {
	var b strings.Builder
	flush := func() error {
		if b.Len() == 0 {
			return nil
		}
		_, err := o.Upsert(o.ctx, []byte(b.String()), "", false)
		b.Reset()
		return err
	}
	for _, m := range o.cluster.Manifests {
		if b.Len()+len(m) > bytesInCall {
			if err := flush(); err != nil {
				return err
			}
		}
		b.WriteString("---\n" + m)
	}
	return flush()
}

func (o *owned) subscribe() error {
	session, err := o.Subscribers().Subscribe(o.ctx, owner.Subscription{Name: "datapath", Role: owner.RoleEnforces, Interest: owner.Interest{Subjects: o.subjects}})
	if err != nil {
		return err
	}
	go func() {
		for {
			m, err := session.Next(o.ctx)
			if err == nil {
				err = session.Ack(m.Seq)
			}
			if err != nil {
				return
			}
		}
	}()
	st, err := o.Reader().Status(o.ctx)
	if err == nil && st.Size.Subjects != len(o.subjects) {
		err = fmt.Errorf("%d of %d subjects have tables", st.Size.Subjects, len(o.subjects))
	}
	return err
}

func (o *owned) comeBack() error {
	session, err := o.Subscribers().Subscribe(o.ctx, owner.Subscription{Name: "datapath", Role: owner.RoleEnforces})
	if err != nil {
		return err
	}
	o.Subscribers().Unsubscribe("datapath", session)
	return o.subscribe()
}

func (o *owned) ofAll() error {
	for i := range 20 {
		text := strings.ReplaceAll(ofAll, "PORT", strconv.Itoa(1000+i%2))
		r, err := o.Upsert(o.ctx, []byte(text), "", false)
		if err != nil {
			return err
		}
		if _, err := o.Subscribers().Wait(o.ctx, r.Revision, nil); err != nil {
			return err
		}
	}
	return nil
}

func (o *owned) burst() error {
	var gone []identity.Numeric
	for _, id := range o.cluster.Identities {
		if _, found := slices.BinarySearch(o.subjects, id.Number); !found {
			gone = append(gone, id.Number)
		}
	}
	for list := range slices.Chunk(gone, 512) {
		if err := o.Identities().SetIdentities(o.ctx, nil, list); err != nil {
			return err
		}
	}
	return o.identities()
}

func (o *owned) keys() ([]policy.Key, error) {
	list, _, err := o.Reader().List(o.ctx, owner.Filter{})
	var keys []policy.Key
	for _, p := range list {
		keys = append(keys, p.Key)
	}
	return keys, err
}

func (o *owned) deleteAll() error {
	keys, err := o.keys()
	if err == nil {
		_, err = o.Delete(o.ctx, keys, false)
	}
	return err
}

func (o *owned) deleteSome() error {
	keys, err := o.keys()
	if err != nil {
		return err
	}
	for i := range 1000 {
		if _, err := o.Delete(o.ctx, keys[i*len(keys)/1000:][:1], false); err != nil {
			return err
		}
	}
	return nil
}

func (o *owned) groups() error {
	for first := 0; first < 400; first += 20 {
		var b strings.Builder
		for i := first; i < first+20; i++ {
			fmt.Fprintf(&b, "---\napiVersion: cilium.io/v2\nkind: CiliumCIDRGroup\nmetadata: {name: g%d}\nspec:\n  externalCIDRs:\n", i)
			for p := range 500 {
				fmt.Fprintf(&b, "  - %d.%d.%d.%d/32\n", 11+i/256, i%256, p/256, p%256)
			}
		}
		if _, err := o.Upsert(o.ctx, []byte(b.String()), "", false); err != nil {
			return err
		}
	}
	return nil
}

func (o *owned) read() error {
	if _, err := o.keys(); err != nil {
		return err
	}
	if _, err := o.Upsert(o.ctx, []byte(strings.ReplaceAll(ofTen, "PORT", "99")), "", true); err != nil {
		return err
	}
	_, err := o.Reader().Status(o.ctx)
	return err
}

// listing returns all manifests in 200 files.
func (o *owned) listing() []directory.File {
	var files []directory.File
	for i, list := 0, slices.Collect(slices.Chunk(o.cluster.Manifests, max(1, len(o.cluster.Manifests)/200))); i < len(list); i++ {
		files = append(files, directory.File{Origin: fmt.Sprintf("%03d.yaml", i), Data: []byte(strings.Join(list[i], "---\n") + o.manifest)})
		o.manifest = ""
	}
	return files
}

func (o *owned) files() error { return o.Feed(managed.SourceFile).Set(o.ctx, o.listing()) }

func (o *owned) oneFile() error {
	all := []byte(strings.Join(o.cluster.Manifests, "---\n"))
	if err := o.Feed(managed.SourceFile).Set(o.ctx, []directory.File{{Origin: "all.yaml", Data: all}}); err != nil {
		return err
	}
	st, err := o.Reader().Status(o.ctx)
	if err == nil && (st.Policies != len(o.cluster.Manifests) || len(st.Problems) > 0) {
		err = fmt.Errorf("%d policies enforced, problems %q", st.Policies, st.Problems)
	}
	return err
}

func (o *owned) fileChanges() error {
	o.manifest = "---\n" + strings.ReplaceAll(ofTen, "PORT", "99")
	return o.files()
}

// processorTime returns the CPU time of the calling thread. It does not depend on the load of the machine.
func processorTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err) // cannot fail: the kernel has this clock
	}
	return time.Duration(now.Nano())
}
