// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/lifecycle"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
)

// recordFile returns the path of the endpoint's record.
func (w *world) recordFile(o workload.Owner) string {
	return filepath.Join(w.dir, "endpoints", o.Key()+".ready.json")
}

// newer returns the record as a later version could write it: intact, with a field that this version does not know.
func newer(t *testing.T, record []byte) []byte {
	t.Helper()
	var e struct {
		Schema  string          `json:"schema"`
		Version int             `json:"version"`
		CRC32C  string          `json:"crc32c"`
		Data    json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(record, &e); err != nil {
		t.Fatal(err)
	}
	e.Version++
	e.Data = append([]byte(`{"later":1,`), e.Data[1:]...)
	e.CRC32C = fmt.Sprintf("%08x", crc32.Checksum(fmt.Appendf(nil, "%s\n%d\n%s", e.Schema, e.Version, e.Data), crc32.MakeTable(crc32.Castagnoli)))
	out, err := json.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func hasLink(ns *netns.Namespace, name string) error {
	return ns.Do(func() error {
		_, err := netlink.LinkByName(name)
		return err
	})
}

// TestKernelUnreadableRecordClosesItsPodAlone proves INV-43 for records: if a record is corrupt or of a newer version,
// its pod keeps its device but has no traffic, its addresses and identity are not released, and other pods are not
// affected.
func TestKernelUnreadableRecordClosesItsPodAlone(t *testing.T) {
	for name, damage := range map[string]func(*testing.T, []byte) []byte{
		"flipped": func(_ *testing.T, b []byte) []byte {
			return bytes.Replace(b, []byte(`"mtu":1500`), []byte(`"mtu":1501`), 1)
		},
		"cut":           func(_ *testing.T, b []byte) []byte { return b[:len(b)/2] },
		"empty":         func(*testing.T, []byte) []byte { return nil },
		"newer version": newer,
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(true)
			lost, b, c := w.pod("lost"), w.pod("b"), w.pod("c")
			to, other := lost.echo(lost.ep.Spec.Addrs[0]), c.echo(c.ep.Spec.Addrs[1])
			conn, err := dialIn(b.ns, "tcp", other, patience)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if err := talk(b.ns, to, patience); err != nil {
				t.Fatal(err)
			}
			w.stop()
			file := w.recordFile(lost.owner)
			whole, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, damage(t, whole), 0o600); err != nil {
				t.Fatal(err)
			}

			w.start(true)
			if err := hasLink(lost.ns, "eth0"); err != nil {
				t.Fatalf("the pod's device after the restart: %v", err)
			}
			if err := talk(b.ns, to, 300*time.Millisecond); err == nil {
				t.Error("the pod has traffic without a record")
			}
			if err := talk(lost.ns, other, 300*time.Millisecond); err == nil {
				t.Error("the pod has traffic without a record")
			}
			if err := exchange(conn, "beside it", patience); err != nil {
				t.Errorf("a connection between two other pods: %v", err)
			}
			n, err := w.node.Endpoints.Allocations.Reconcile(t.Context())
			if err != nil || n != 0 || len(w.leases.held) != 3 || len(w.identities.held) != 3 {
				t.Errorf("the comparison with ipam released %d, %v; held %v", n, err, w.leases.held)
			}
			text := strings.Join(w.node.Endpoints.Report.Counts().BadRecords, "\n")
			if !strings.Contains(text, file) || !strings.Contains(text, lost.ep.Device.HostName) {
				t.Errorf("the status does not name %s and %s:\n%s", file, lost.ep.Device.HostName, text)
			}
			after, err := os.ReadFile(file)
			if err != nil || !bytes.Equal(after, damage(t, whole)) {
				t.Errorf("the file was changed: %v", err)
			}

			// The program of the closed pod is restored like any other.
			if err := w.home.Do(func() error {
				link, err := netlink.LinkByName(lost.ep.Device.HostName)
				if err != nil {
					return err
				}
				return netlink.QdiscDel(&netlink.GenericQdisc{
					QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}, QdiscType: "clsact",
				})
			}); err != nil {
				t.Fatal(err)
			}
			if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			link := endpoint.HostDevice{Name: lost.ep.Device.HostName, Index: lost.ep.Device.HostIndex}
			if diffs, err := w.node.Devices.CheckFilters(link); err != nil || len(diffs) != 0 {
				t.Errorf("its filters after an audit: %v, %v", diffs, err)
			}

			if err := os.WriteFile(file, whole, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := w.node.Endpoints.Auditor.Audit(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			for _, err := range []error{talk(b.ns, to, patience), talk(lost.ns, other, patience), exchange(conn, "still", patience)} {
				if err != nil {
					t.Errorf("after the repair of the record: %v", err)
				}
			}
			diffs, err := w.node.Endpoints.Reconciler.Check(t.Context(), lost.owner, lifecycle.Expected{})
			if err != nil || len(diffs) != 0 {
				t.Errorf("check after the repair: %v, %v", diffs, err)
			}

			w.stop()
			if err := os.WriteFile(file, damage(t, whole), 0o600); err != nil {
				t.Fatal(err)
			}
			w.start(true)
			if existed, err := w.delete(lost.owner); err != nil || !existed {
				t.Errorf("DEL of its owner: %v, %v", existed, err)
			}
			servicetest.EventuallyNil(t, "the pod's addresses and identity released, its device and record removed", func() error {
				w.leases.mu.Lock()
				defer w.leases.mu.Unlock()
				if _, err := os.Lstat(file); len(w.leases.held) != 2 || !errors.Is(err, os.ErrNotExist) || hasLink(lost.ns, "eth0") == nil || len(w.node.Endpoints.Report.Counts().BadRecords) != 0 {
					return errors.Join(err, fmt.Errorf("leases %v", w.leases.held))
				}
				return nil
			})
		})
	}
}
