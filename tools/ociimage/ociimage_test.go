// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ociimage

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// image returns an image with a program in a new directory, with the modification time made.
func image(t *testing.T, made time.Time) Image {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	err := errors.Join(os.WriteFile(program, []byte("machine code"), 0o700), os.Chtimes(program, made, made))
	if err != nil {
		t.Fatal(err)
	}
	return Image{
		Name: "example.org/app:v1", Architecture: "arm64", Env: []string{"PATH=/usr/bin"},
		Labels: map[string]string{"b": "2", "a": "1", "c": "3"},
		Files: []File{
			{Path: "/var/run", Link: "../run"},
			{Path: "/run", Dir: true},
			{Path: "/usr/bin/program", Source: program},
			{Path: "/etc/app.conf", Source: program, Mode: 0o644},
		},
	}
}

func written(t *testing.T, img Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := img.Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// read returns the entries of an archive by name, and a line that describes each.
func read(t *testing.T, r io.Reader) (content map[string][]byte, lines []string) {
	t.Helper()
	content = map[string][]byte{}
	for a := tar.NewReader(r); ; {
		h, err := a.Next()
		if errors.Is(err, io.EOF) {
			return content, lines
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(a)
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || h.ModTime.Unix() != 0 {
			t.Errorf("%s has the owner %d:%d %q and the time %s", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		content[h.Name] = b
		lines = append(lines, fmt.Sprintf("%c %04o %s %s", h.Typeflag, h.Mode, h.Name, h.Linkname))
	}
}

func TestSameFilesGiveTheSameBytes(t *testing.T) {
	first := image(t, time.Unix(1_000_000_000, 0))
	second := image(t, time.Now())
	slices.Reverse(second.Files)
	if !bytes.Equal(written(t, first), written(t, second)) {
		t.Error("the images depend on the time, the place or the order of their files")
	}
	second.Env = []string{"PATH=/bin"}
	if bytes.Equal(written(t, first), written(t, second)) {
		t.Error("images with different environments are the same")
	}
}

func TestImageLeadsFromItsIndexToItsFiles(t *testing.T) {
	layout, _ := read(t, bytes.NewReader(written(t, image(t, time.Now()))))
	blob := func(d descriptor) []byte {
		t.Helper()
		b := layout["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
		if sum := sha256.Sum256(b); d.Digest != "sha256:"+hex.EncodeToString(sum[:]) || d.Size != len(b) {
			t.Fatalf("%s of %d bytes has the digest %x and %d bytes", d.Digest, d.Size, sum, len(b))
		}
		return b
	}
	decode := func(b []byte, v any) {
		t.Helper()
		if err := json.Unmarshal(b, v); err != nil {
			t.Fatal(err)
		}
	}
	var i index
	decode(layout["index.json"], &i)
	if len(i.Manifests) != 1 || *i.Manifests[0].Platform != (platform{"arm64", "linux"}) ||
		i.Manifests[0].Annotations["io.containerd.image.name"] != "example.org/app:v1" ||
		i.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "v1" {
		t.Fatalf("index: %+v", i)
	}
	var m manifest
	decode(blob(i.Manifests[0]), &m)
	var c config
	decode(blob(m.Config), &c)
	if c.platform != (platform{"arm64", "linux"}) || len(m.Layers) != 1 ||
		!slices.Equal(c.Config.Env, []string{"PATH=/usr/bin"}) {
		t.Fatalf("manifest %+v, config %+v", m, c)
	}
	z, err := gzip.NewReader(bytes.NewReader(blob(m.Layers[0])))
	if err != nil {
		t.Fatal(err)
	}
	plain, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	if sum := sha256.Sum256(plain); !slices.Equal(c.RootFS.DiffIDs, []string{"sha256:" + hex.EncodeToString(sum[:])}) {
		t.Errorf("the config says %v of a layer of digest %x", c.RootFS.DiffIDs, sum)
	}
	files, lines := read(t, bytes.NewReader(plain))
	want := []string{
		"5 0755 etc/ ", "0 0644 etc/app.conf ", "5 0755 run/ ", "5 0755 usr/ ", "5 0755 usr/bin/ ", "0 0755 usr/bin/program ",
		"5 0755 var/ ", "2 0777 var/run ../run",
	}
	if !slices.Equal(lines, want) {
		t.Errorf("the layer has\n%s\nwant\n%s", strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
	if string(files["usr/bin/program"]) != "machine code" {
		t.Errorf("the program is %q", files["usr/bin/program"])
	}
}

func TestFilesThatCannotBeTogetherAreRefused(t *testing.T) {
	good := image(t, time.Now())
	source := good.Files[2].Source
	for want, files := range map[string][]File{
		"is not a clean absolute path": {{Path: "usr/bin/x", Source: source}},
		"occurs twice":                 {{Path: "/x", Source: source}, {Path: "/x", Link: "y"}},
		"which is not a directory":     {{Path: "/var/run", Link: "../run"}, {Path: "/var/run/x", Source: source}},
		"no such file":                 {{Path: "/x", Source: source + "-missing"}},
		"is no regular file":           {{Path: "/x", Source: filepath.Dir(source)}},
	} {
		img := good
		img.Files = files
		if err := img.Write(io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: got %v, want an error with %q", files, err, want)
		}
	}
	for _, img := range []Image{{Name: "x"}, {Architecture: "arm64"}} {
		if img.Write(io.Discard) == nil {
			t.Errorf("%+v: no error", img)
		}
	}
}
