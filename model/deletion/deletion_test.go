// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package deletion

import (
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/workload"
)

const (
	name = "d72e032fedd94c16f31250b1845eb1ceaf0e6aa079211c2739318c3290c740d8"
	line = `{"version":1,"containerId":"c1","interfaceName":"eth0","time":"2026-01-02T03:04:05Z"}` + "\n"
)

// TestStoredFormStaysWhatItIs: the format of spooled deletions must not change, because a plugin and a datapath of
// different versions share the directory.
func TestStoredFormStaysWhatItIs(t *testing.T) {
	at := time.Date(2026, 1, 2, 4, 4, 5, 0, time.FixedZone("", 3600))
	e := Entry{Owner: workload.Owner{ContainerID: "c1", Interface: "eth0"}, Time: at}
	b, err := e.Format()
	if err != nil || string(b) != line || e.Owner.Key() != name {
		t.Errorf("%s is written as %s into %s, %v", e.Owner, b, e.Owner.Key(), err)
	}
	got, err := Parse(name, []byte(line))
	if err != nil || got.Owner != e.Owner || !got.Time.Equal(e.Time) {
		t.Errorf("read as %v, %v", got, err)
	}
	if dir := Dir("/var/lib/sluice"); dir != "/var/lib/sluice/cni/deletes" {
		t.Errorf("the directory is %s", dir)
	}
}

func TestWhatIsNoEntryIsRefused(t *testing.T) {
	for what, c := range map[string]struct{ name, content string }{
		"another owner's":       {"wrong", line},
		"a later version":       {name, strings.Replace(line, `"version":1`, `"version":2`, 1)},
		"no version":            {name, strings.Replace(line, `"version":1,`, "", 1)},
		"a field of the future": {name, strings.Replace(line, `"time"`, `"manager":"x","time"`, 1)},
		"no time":               {name, strings.Replace(line, `,"time":"2026-01-02T03:04:05Z"`, "", 1)},
		"two entries":           {name, line + line},
		"half of one":           {name, line[:40]},
		"nothing":               {name, ""},
		"the owner as an object": {
			name, `{"version":1,"Owner":{"containerId":"c1","interfaceName":"eth0"},"time":"2026-01-02T03:04:05Z"}`,
		},
	} {
		if e, err := Parse(c.name, []byte(c.content)); err == nil {
			t.Errorf("%s is read as %v", what, e)
		}
	}
	for name, want := range map[string]bool{name: true, ".new-1": false, ".": false, Bad(name): false} {
		if IsEntry(name) != want {
			t.Errorf("%s is an entry: %t", name, !want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(name, []byte(line))
	f.Add("", []byte(`{}`))
	f.Fuzz(func(t *testing.T, name string, content []byte) {
		e, err := Parse(name, content)
		if err != nil {
			return
		}
		if e.Owner.Key() != name || e.Time.IsZero() {
			t.Fatalf("%q is read as the deletion %v", name, e)
		}
		b, err := e.Format()
		if err != nil {
			return // a time that JSON cannot hold in UTC
		}
		if again, err := Parse(name, b); err != nil || again.Owner != e.Owner || !again.Time.Equal(e.Time) {
			t.Fatalf("%v is written %s, and that is %v, %v", e, b, again, err)
		}
	})
}
