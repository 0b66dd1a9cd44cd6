// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
	"time"
)

// printed returns the output of a capture of some packets.
func printed(packets ...int) []byte {
	b := fileHeader(nil, "test", "eth0", "a test", whole)
	for _, n := range packets {
		b = packetBlock(b, packet{time: time.Unix(1, 2), data: make([]byte, n), length: n})
	}
	return statisticsBlock(b, time.Unix(3, 4), uint64(len(packets)), 0)
}

func TestStreamHasWholeBlocksWhereverItIsCut(t *testing.T) {
	all := printed(100, 1, 33)
	for cut := range len(all) + 1 {
		var out bytes.Buffer
		s, err := (&Flags{}).OpenStream(&out)
		if err != nil {
			t.Fatal(err)
		}
		for from := 0; from < cut; from += 7 {
			if _, err := s.Write(all[from:min(cut, from+7)]); err != nil {
				t.Fatal(err)
			}
		}
		got := out.Bytes()
		if s.Complete() != (cut == len(all)) || !bytes.HasPrefix(all, got) || len(got) > cut {
			t.Fatalf("of %d bytes %d were written, complete %v", cut, len(got), s.Complete())
		}
		packets := uint64(0)
		for rest := got; len(rest) > 0; rest = rest[binary.LittleEndian.Uint32(rest[4:]):] {
			if binary.LittleEndian.Uint32(rest) == blockPacket {
				packets++
			}
		}
		if packets != s.Packets() {
			t.Fatalf("%d packets, want %d", s.Packets(), packets)
		}
	}
}

func TestStreamRefusesWhatIsNoCapture(t *testing.T) {
	good := printed(10)
	header := fileHeader(nil, "test", "eth0", "a test", whole)
	section := binary.LittleEndian.Uint32(header[4:])
	sized := func(size uint32) []byte {
		b := binary.LittleEndian.AppendUint32(nil, blockPacket)
		return append(header[:section:section], binary.LittleEndian.AppendUint32(b, size)...)
	}
	for name, content := range map[string][]byte{
		"text":             []byte("Error from server: no such pod"),
		"a packet first":   good[section:],
		"two sections":     append(bytes.Clone(good), good...),
		"no size":          sized(0),
		"an odd size":      sized(33),
		"too large a size": sized(1 << 30),
	} {
		var out bytes.Buffer
		s, err := (&Flags{}).OpenStream(&out)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write(content); !errors.Is(err, errNoCapture) {
			t.Errorf("%s: %v", name, err)
		}
	}
	var out bytes.Buffer
	s, err := (&Flags{maxSize: 500}).OpenStream(&out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write(printed(1000)); !errors.Is(err, errNoCapture) || out.Len() > 500 {
		t.Errorf("more than --max-size: %v, %d bytes", err, out.Len())
	}
}

func TestArgumentsCaptureTheSame(t *testing.T) {
	o := Flags{
		addresses: []string{"10.0.0.0/8"}, ports: []uint{80, 81}, protocols: []string{"tcp"}, count: 7,
		duration: time.Minute, snaplen: 60, maxSize: 1<<20 + 1, buffer: 2 << 20, drops: true, file: "x",
	}
	cmd := Command(nil)
	if err := cmd.ParseFlags(o.Args()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"address": "[10.0.0.0/8]", "port": "[80,81]", "protocol": "[tcp]", "count": "7", "duration": "1m0s", "snaplen": "60",
		"max-size": "1048577B", "buffer": "2MiB", "drops": "true", "write": "",
	} {
		if got := cmd.Flags().Lookup(name).Value.String(); got != want {
			t.Errorf("--%s is %s, want %s", name, got, want)
		}
	}
}
