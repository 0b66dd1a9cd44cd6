// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// captured summarises a pcapng file.
type captured struct {
	packets  int
	sent     int // packets sent by the pod
	between  int // IPv4 packets between two addresses
	complete bool
}

// readCapture reads a file, whose blocks must be complete.
func (p kubectlSluice) readCapture(file string, a, b netip.Addr) (c captured) {
	p.Helper()
	content, err := os.ReadFile(file)
	p.must(err)
	le := binary.LittleEndian
	for len(content) > 0 {
		size := 0
		if len(content) >= 12 {
			size = int(le.Uint32(content[4:]))
		}
		if size < 12 || size > len(content) || int(le.Uint32(content[size-4:])) != size {
			p.Fatalf("%s ends with an incomplete block of %d bytes", file, len(content))
		}
		const packet, statistics = 6, 5
		block := content[:size]
		content = content[size:]
		c.complete = le.Uint32(block) == statistics
		if le.Uint32(block) != packet {
			continue
		}
		c.packets++
		data := block[28 : 28+le.Uint32(block[20:])]
		// The first option contains the flags: 2 for sent, 1 for received.
		if options := block[28+(len(data)+3)&^3:]; le.Uint16(options) == 2 && le.Uint32(options[4:])&3 == 2 {
			c.sent++
		}
		if len(data) >= 34 && data[12] == 8 && data[13] == 0 {
			from, to := netip.AddrFrom4([4]byte(data[26:30])), netip.AddrFrom4([4]byte(data[30:34]))
			if from == a && to == b || from == b && to == a {
				c.between++
			}
		}
	}
	return c
}

// capture starts `kubectl sluice capture`, and waits until the node captures packets.
func (p kubectlSluice) capture(args ...string) (*exec.Cmd, *safeBuffer) {
	p.Helper()
	cmd := p.command(p.Context(), append([]string{"capture"}, args...)...)
	errOut := &safeBuffer{}
	cmd.Stderr = errOut
	cmd.WaitDelay = time.Minute
	p.must(cmd.Start())
	p.eventually("the node captures", func() error {
		if len(p.processes(1, "until-input-[e]nds")) == 0 {
			return fmt.Errorf("%s", errOut)
		}
		return nil
	})
	return cmd, errOut
}

// noCapture waits until a capture is removed, on the node and in the API.
func (p kubectlSluice) noCapture(after string) {
	p.Helper()
	p.eventually("nothing is left after "+after, func() error {
		if left := p.processes(1, "probe.[h]old"); len(left) > 0 {
			return fmt.Errorf("the node has the processes %q", left)
		}
		out, err := p.c.Kubectl(p.Context(), "get", "jobs,pods", "--all-namespaces", "--output=name",
			"--selector=app.kubernetes.io/name=sluice-capture")
		if err == nil && len(out) > 0 {
			err = fmt.Errorf("there is %s", out)
		}
		return err
	})
}

func (p kubectlSluice) testCapture() {
	p.namespace("shop")
	p.Cleanup(func() { _, _ = p.c.Kubectl(contextOf(p), "delete", "namespace", "shop") })
	p.serverOn("node1", "shop", "client")
	p.serverOn("node2", "shop", "web")
	client, web := p.ready("shop", "client"), p.ready("shop", "web")
	a, b := netip.MustParseAddr(client.address()), netip.MustParseAddr(web.address())
	connect := func() {
		p.Helper()
		for range 3 {
			p.must(p.connects(client, web.address()+":8080"))
		}
	}
	file := filepath.Join(p.home, "web.pcapng")

	// The capture ends after its duration, and has both directions of connections from the other node.
	begin := time.Now()
	cmd, errOut := p.capture("shop/web", "--write="+file, "--port=8080", "--duration=10s")
	p.captureRights()
	connect()
	if err := cmd.Wait(); err != nil {
		p.Errorf("with a duration it ends with %v: %s", err, errOut)
	}
	p.Logf("took %.1f s: %s", time.Since(begin).Seconds(), errOut)
	got := p.readCapture(file, a, b)
	if got.between < 18 || got.between != got.packets || got.sent == 0 || got.sent == got.packets || !got.complete ||
		!strings.Contains(errOut.String(), fmt.Sprintf("%d packets captured, 0 lost", got.packets)) {
		p.Errorf("%+v: %s", got, errOut)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		p.Errorf("the file: %v, %v", info, err)
	}
	p.noCapture("its time")

	// An interrupt of the terminal's process group ends the capture, and the file is complete.
	cmd, errOut = p.capture("shop/web", "--write="+file, "--protocol=tcp")
	connect()
	p.must(cmd.Process.Signal(unix.SIGINT))
	if err := cmd.Wait(); err != nil {
		p.Errorf("interrupted, it ends with %v: %s", err, errOut)
	}
	if got := p.readCapture(file, a, b); got.between < 18 || !got.complete ||
		!strings.Contains(errOut.String(), fmt.Sprintf("%d packets captured, 0 lost", got.packets)) {
		p.Errorf("interrupted: %+v: %s", got, errOut)
	}
	p.noCapture("an interrupt")

	// If it is killed, it cannot clean up, but the written part is readable.
	cmd, _ = p.capture("shop/web", "--write="+file)
	connect()
	p.must(cmd.Process.Kill())
	_ = cmd.Wait()
	p.readCapture(file, a, b)
	p.eventually("the capture has ended", func() error {
		if left := p.processes(1, "until-input-[e]nds"); len(left) > 0 {
			return fmt.Errorf("there is %q", left)
		}
		return nil
	})
	begin = time.Now()
	p.noCapture("a kill")
	p.Logf("the leftovers of a killed command were removed after %.0f s", time.Since(begin).Seconds())

	p.captureEnds(connect)
	p.captureRefuses(file)
	p.kubectl("delete", "namespace", "shop")
	p.healthy()
}

// captureEnds: the capture ends when its reader closes the output, and when the capture's pod is deleted.
func (p kubectlSluice) captureEnds(connect func()) {
	p.Helper()
	ctx, cancel := context.WithTimeout(p.Context(), 2*time.Minute)
	defer cancel()
	cmd := p.command(ctx, "capture", "shop/web")
	out, err := cmd.StdoutPipe()
	p.must(err)
	errOut := &safeBuffer{}
	cmd.Stderr = errOut
	p.must(cmd.Start())
	head := make([]byte, 4)
	if _, err := out.Read(head); err != nil || binary.LittleEndian.Uint32(head) != 0x0a0d0d0a {
		p.Errorf("the output begins with %x, %v: %s", head, err, errOut)
	}
	p.must(out.Close())
	connect()
	if err := cmd.Wait(); err != nil {
		p.Errorf("without a reader it ends with %v: %s", err, errOut)
	}
	p.noCapture("the end of its reader")

	file := filepath.Join(p.home, "cut.pcapng")
	cmd, errOut = p.capture("shop/web", "--write="+file)
	connect()
	p.kubectl("--namespace=sluice-system", "delete", "pod", "--selector=app.kubernetes.io/name=sluice-capture", "--now")
	if err := cmd.Wait(); err == nil || !strings.Contains(errOut.String(), "the capture is incomplete after") {
		p.Errorf("cut off, it ends with %v: %s", err, errOut)
	}
	p.readCapture(file, netip.Addr{}, netip.Addr{})
	p.noCapture("its pod was deleted")
}

// captureRefuses pods that cannot be captured. It creates no Job for them, and does not change the file.
func (p kubectlSluice) captureRefuses(file string) {
	p.Helper()
	before, err := os.ReadFile(file)
	p.must(err)
	var pods struct{ Items []kubePod }
	p.must(p.c.Get(p.Context(), &pods, "pods", "--namespace=sluice-system", "--selector=app.kubernetes.io/name=sluice"))
	for _, c := range []struct{ pod, why string }{
		{"shop/nobody", "pod shop/nobody not found"},
		{"sluice-system/" + pods.Items[0].Metadata.Name, "uses the network of its node"},
		{"shop/web --interface=eth7", "the pod has no eth7, but eth0"},
		{"shop/web --node=node1", "is not among the nodes"},
		{"a/b/c", "is not [NAMESPACE/]POD"},
		{"shop/web --port=70000", "is not a port"},
	} {
		_, errOut, code := p.plugin(append([]string{"capture", "--write=" + file}, strings.Fields(c.pod)...)...)
		if code == 0 || !strings.Contains(errOut, c.why) {
			p.Errorf("%s: exit code %d: %s", c.pod, code, errOut)
		}
	}
	after, err := os.ReadFile(file)
	p.must(err)
	if string(after) != string(before) {
		p.Error("a refused capture has changed the file")
	}
	p.noCapture("what was refused")
}

// captureRights: the container has two capabilities and sees only its own processes.
func (p kubectlSluice) captureRights() {
	p.Helper()
	const netRaw, sysAdmin = 13, 21
	out, err := p.c.InNode(p.Context(), 1, "sh", "-c",
		"for f in $(grep -la until-input-[e]nds /proc/[0-9]*/cmdline); do "+
			"grep -E '^(Cap|NoNew|Seccomp:)' ${f%cmdline}status; done")
	p.must(err)
	all := fmt.Sprintf("%016x", 1<<netRaw|1<<sysAdmin)
	for _, line := range []string{"CapEff:\t" + all, "CapBnd:\t" + all, "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if strings.Count(string(out), line) != 1 {
			p.Errorf("no single %q in %s", line, out)
		}
	}
}
