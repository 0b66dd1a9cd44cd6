// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package tasks

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// machine is a directory with files like those in /proc/self and /sys/fs/cgroup.
type machine struct {
	t   *testing.T
	dir string
}

func newMachine(t *testing.T, cgroup, mountinfo string) machine {
	t.Helper()
	m := machine{t, t.TempDir()}
	m.write("proc/cgroup", cgroup)
	m.write("proc/mountinfo", strings.ReplaceAll(mountinfo, "/sys", m.dir+"/sys"))
	return m
}

func (m machine) write(path, content string) {
	m.t.Helper()
	path = filepath.Join(m.dir, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// limit writes the limit and the current number of tasks of a cgroup.
func (m machine) limit(dir, limit, current string) {
	m.t.Helper()
	m.write(dir+"/pids.max", limit+"\n")
	m.write(dir+"/pids.current", current+"\n")
}

const (
	unified = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
	mixed   = "30 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
		"31 23 0:28 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n" +
		"32 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)

func TestTheTightestCgroupCounts(t *testing.T) {
	for name, c := range map[string]struct {
		cgroup, mounts string
		dirs           map[string][2]string
		want           Room
		limited        bool
	}{
		"its own": {"0::/a.slice/b.service\n", unified, map[string][2]string{
			"sys/fs/cgroup/a.slice": {"max", "50"}, "sys/fs/cgroup/a.slice/b.service": {"64", "24"},
		}, Room{40, 64, "sys/fs/cgroup/a.slice/b.service/pids.max"}, true},
		"one above it": {"0::/a.slice/b.service\n", unified, map[string][2]string{
			"sys/fs/cgroup/a.slice": {"100", "95"}, "sys/fs/cgroup/a.slice/b.service": {"64", "24"},
		}, Room{5, 100, "sys/fs/cgroup/a.slice/pids.max"}, true},
		"one that was lowered": {"0::/a\n", unified, map[string][2]string{
			"sys/fs/cgroup/a": {"8", "20"},
		}, Room{0, 8, "sys/fs/cgroup/a/pids.max"}, true},
		"of the first version": {"4:memory:/m\n3:cpu,pids:/p\n0::/u\n", mixed, map[string][2]string{
			"sys/fs/cgroup/pids/p": {"10", "3"}, "sys/fs/cgroup/memory/m": {"2", "1"},
		}, Room{7, 10, "sys/fs/cgroup/pids/p/pids.max"}, true},
		"a part of the hierarchy is mounted": {
			"0::/kubepods/pod1/c\n",
			strings.Replace(unified, "0:26 / ", "0:26 /kubepods/pod1 ", 1),
			map[string][2]string{
				"sys/fs/cgroup": {"12", "11"}, "sys/fs/cgroup/c": {"max", "11"},
			},
			Room{1, 12, "sys/fs/cgroup/pids.max"},
			true,
		},
		"another part is mounted": {
			"0::/elsewhere\n",
			strings.Replace(unified, "0:26 / ", "0:26 /kubepods ", 1),
			map[string][2]string{
				"sys/fs/cgroup": {"1", "1"},
			},
			Room{},
			false,
		},
		"no limit":   {"0::/a\n", unified, map[string][2]string{"sys/fs/cgroup/a": {"max", "7"}}, Room{}, false},
		"no cgroups": {"0::/a\n", "", nil, Room{}, false},
		"no cgroup":  {"", unified, nil, Room{}, false},
		"garbage":    {"0\n::\nx", " - \n" + unified, nil, Room{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, c.cgroup, c.mounts)
			for dir, v := range c.dirs {
				m.limit(dir, v[0], v[1])
			}
			got, limited := left(filepath.Join(m.dir, "proc"))
			got.File = strings.TrimPrefix(got.File, m.dir+"/")
			if got != c.want || limited != c.limited {
				t.Errorf("%+v, %v; want %+v, %v", got, limited, c.want, c.limited)
			}
		})
	}
}

func TestTheErrorNamesTheLimit(t *testing.T) {
	m := newMachine(t, "0::/a\n", unified)
	m.limit("sys/fs/cgroup/a", "16", "9")
	proc := filepath.Join(m.dir, "proc")
	if err := need(proc, 7, "a service"); err != nil {
		t.Errorf("7 of 7: %v", err)
	}
	err := need(proc, 8, "a service")
	const want = "sys/fs/cgroup/a/pids.max allows 7 more threads of 16, and a service needs 8: raise"
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("8 of 7: %v", err)
	}
}

// TestThisMachineIsRead reads the real files of the machine, with any limits.
func TestThisMachineIsRead(t *testing.T) {
	if err := Need(1, "this test"); err != nil {
		t.Error(err)
	}
	if len(directories("/proc/self")) == 0 {
		t.Error("no cgroup of this process was found")
	}
	if r, limited := Left(); limited && (r.Limit <= 0 || r.Left > r.Limit) {
		t.Errorf("%+v", r)
	}
}
