// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/servicetest"
)

// TestDirectoryUnderConstantRenamesMissesNothing: a process renames files into and out of the directory without a
// pause. Meanwhile, files that are written in place or removed are still applied, and the final state is correct.
func TestDirectoryUnderConstantRenamesMissesNothing(t *testing.T) {
	p := newPlace(t)
	p.ready(map[string]string{"stays.yaml": policy("stays", 1), "goes.yaml": policy("goes", 1)})
	p.want("at first", "goes.yaml: goes 1", "stays.yaml: stays 1")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for w := range 2 {
		wg.Go(func() {
			name := fmt.Sprintf("w%d", w)
			for i := 1; ; i++ {
				next := p.path("." + name)
				err := os.WriteFile(next, []byte(policy(name, i%60_000+1)), 0o644)
				if err = errors.Join(err, os.Rename(next, p.path(name+".yaml"))); err != nil {
					t.Error(err)
					return
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	p.write("stays.yaml", policy("stays", 2))
	if err := os.Remove(p.path("goes.yaml")); err != nil {
		t.Error(err)
	}
	p.want("during the renames", "stays.yaml: stays 2", "w0.yaml: w0 …", "w1.yaml: w1 …")
	close(stop)
	wg.Wait()
	var last []string
	for _, name := range []string{"w0", "w1"} {
		data, err := os.ReadFile(p.path(name + ".yaml"))
		p.do(err)
		_, port, _ := strings.Cut(string(data), "port: ")
		port, _, _ = strings.Cut(port, "}")
		last = append(last, name+".yaml: "+name+" "+port)
	}
	p.want("afterwards", append([]string{"stays.yaml: stays 2"}, last...)...)
}

// TestFileOfThousandsOfPolicies reads a file with thousands of policies. The policies that exceed the share of their
// namespace isolate the pods that they select. A file with a document of too many values is refused; the message
// contains the name of the file.
func TestFileOfThousandsOfPolicies(t *testing.T) {
	many := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "---\napiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p%d}\nspec: {podSelector: {}}\n", i)
		}
		return b.String()
	}
	// All files must be in the first listing: a policy of a later listing would be newer and exceed the share. So
	// make Quiet so short that no file counts as being written.
	p := newPlace(t, func(s *directory.Source) { s.Quiet = time.Nanosecond })
	p.ready(map[string]string{
		"few.yaml": many(900), "large.yaml": strings.ReplaceAll(many(2000), "name: p", "name: q"), "a.yaml": policy("a", 1),
		"values.yaml": policy("b", 1) + "---\n[" + strings.Repeat("[],", 200_000) + "]\n",
	})
	matches := func() bool {
		state := p.state()
		exceed := 0
		for _, line := range state {
			if strings.Contains(line, "!exceeds the share of namespace default of limits.policies (1000)") {
				exceed++
			}
		}
		return len(state) == 2902 && exceed == 2002 && state[0] == "a.yaml: a 1" &&
			strings.HasPrefix(state[len(state)-1], "values.yaml: b 1 !document 2 (line 8): manifest has ")
	}
	servicetest.EventuallyNil(t, "the state of the files", func() error {
		if !matches() {
			state := p.state()
			return fmt.Errorf("%d lines, at the end %q", len(state), state[max(0, len(state)-1):])
		}
		return nil
	})
}
