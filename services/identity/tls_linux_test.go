// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

// secret is the volume of a Secret as kubelet writes it: each version has its own directory, and links to the newest
// version, which all change at the same time. root owns the files, and the group can read them, as fsGroup requires.
type secret struct {
	t        *testing.T
	dir      string
	versions int
}

func (s *secret) write(content map[string][]byte) {
	s.t.Helper()
	s.versions++
	version := fmt.Sprint("..version_", s.versions)
	dir := filepath.Join(s.dir, version)
	must := func(err error) {
		s.t.Helper()
		if err != nil {
			s.t.Fatal(err)
		}
	}
	must(os.Mkdir(dir, 0o755))
	for name, bytes := range content {
		file := filepath.Join(dir, name)
		must(os.WriteFile(file, bytes, 0o440))
		must(os.Chown(file, 0, 65700))
		if s.versions == 1 {
			must(os.Symlink(filepath.Join("..data", name), filepath.Join(s.dir, name)))
		}
	}
	must(os.Symlink(version, filepath.Join(s.dir, "..data_tmp")))
	must(os.Rename(filepath.Join(s.dir, "..data_tmp"), filepath.Join(s.dir, "..data")))
	if s.versions > 1 {
		must(os.RemoveAll(filepath.Join(s.dir, fmt.Sprint("..version_", s.versions-1))))
	}
}

// of returns what a user of etcd has now.
func (s *secret) of(etcd *etcdtest.TLS, user string) map[string][]byte {
	s.t.Helper()
	cert, key := etcd.Files(user)
	content := map[string][]byte{}
	for name, file := range map[string]string{"ca.crt": etcd.CA, "tls.crt": cert, "tls.key": key} {
		bytes, err := os.ReadFile(file)
		if err != nil {
			s.t.Fatal(err)
		}
		content[name] = bytes
	}
	return content
}

func (s *secret) flags() []string {
	return []string{
		"--etcd-ca", filepath.Join(s.dir, "ca.crt"), "--etcd-cert", filepath.Join(s.dir, "tls.crt"),
		"--etcd-key", filepath.Join(s.dir, "tls.key"),
	}
}

// TestKernelRotatedCertificatesNeedNoRestart: the process runs in its sandbox, and follows etcd to a new certificate
// authority only by the changed files of its Secret.
func TestKernelRotatedCertificatesNeedNoRestart(t *testing.T) {
	etcd := etcdtest.StartTLS(t)
	b := &bench{Place: servicetest.NewPlace(t, instance.FirstServiceID), t: t, etcd: etcd.Server}
	volume := &secret{t: t, dir: filepath.Join(b.Dir, "etcd")}
	if err := os.Mkdir(volume.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	volume.write(volume.of(etcd, "n1"))
	p := b.start(volume.flags()...)
	p.Serving()
	number, err := p.resolve("c1", "web")
	if err != nil {
		t.Fatal(err)
	}

	etcd.Rotate()
	servicetest.Eventually(t, "the reason, until the Secret is renewed", func() bool {
		st := p.status()
		return !st.GetStoreConnected() && strings.Contains(st.GetStoreError(), "certificate")
	})
	volume.write(volume.of(etcd, "n1"))
	servicetest.Eventually(t, "a connection by the renewed certificates", func() bool {
		return p.status().GetStoreConnected()
	})
	if _, err := p.resolve("c2", "db"); err != nil {
		t.Errorf("a new label set after the rotation: %v", err)
	}
	if again, err := p.resolve("c3", "web"); err != nil || again != number {
		t.Errorf("the same label set: %d, %v, want %d", again, err, number)
	}

	// A certificate of an authority that etcd does not know.
	stranger := volume.of(etcd, "n1")
	others := volume.of(etcdtest.StartTLS(t), "n1")
	stranger["tls.crt"], stranger["tls.key"] = others["tls.crt"], others["tls.key"]
	volume.write(stranger)
	etcd.Down()
	etcd.Up()
	servicetest.Eventually(t, "that etcd refuses, in the status", func() bool {
		st := p.status()
		return !st.GetStoreConnected() && strings.Contains(st.GetStoreError(), "etcd refuses the connection: remote error")
	})
	volume.write(volume.of(etcd, "n1"))
	servicetest.Eventually(t, "a connection by a certificate that etcd knows", func() bool {
		return p.status().GetStoreConnected()
	})

	// The certificate of another key, when the next connection is made.
	broken := volume.of(etcd, "n1")
	broken["tls.key"] = volume.of(etcd, "other")["tls.key"]
	volume.write(broken)
	etcd.Down()
	etcd.Up()
	servicetest.Eventually(t, "the setting and the file in the status", func() bool {
		st := p.status()
		return !st.GetStoreConnected() && strings.Contains(st.GetStoreError(), "etcd.cert and etcd.key: "+volume.dir)
	})
	volume.write(volume.of(etcd, "n1"))
	servicetest.Eventually(t, "a connection by the repaired Secret", func() bool {
		return p.status().GetStoreConnected()
	})
	if code := p.Stop(); code != 0 {
		t.Errorf("exit code %d after SIGTERM\n%s", code, p.Log())
	}
}

// TestKernelMissingCertificateEndsTheStart: the pod starts without the Secret, because the Secret is optional.
func TestKernelMissingCertificateEndsTheStart(t *testing.T) {
	etcd := etcdtest.StartTLS(t)
	b := &bench{Place: servicetest.NewPlace(t, instance.FirstServiceID), t: t, etcd: etcd.Server}
	volume := &secret{t: t, dir: filepath.Join(b.Dir, "etcd")}
	p := b.start(volume.flags()...)
	if code, want := p.Exit(), "etcd.ca: open "+volume.dir; code != 1 || !strings.Contains(p.Log(), want) {
		t.Errorf("exit code %d, want 1 and %q in\n%s", code, want, p.Log())
	}
}
